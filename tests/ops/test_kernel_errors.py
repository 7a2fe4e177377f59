"""What a compiled kernel refuses is one of our errors, however torch brings it to Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.pools import PLAIN, make_pool
from torch import Tensor

from kvloom import KVView, ops
from kvloom.errors import ArgumentError, KVError, OutOfMemory, ShapeError
from kvloom.ops import choice, schemas
from kvloom.ops.impl import cpu

compiled = pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled backend: {cpu.WHY_NOT}")

NEW, FAR = torch.ones(2, 2, 8), torch.tensor([0, 99])
SENTENCE = "slots must be in [0, 12), got 99 for token 1"


def cache() -> KVView:
    return make_pool("B S H D", PLAIN).view()


def rotate_far(kv: KVView) -> Tensor:
    return ops.rotate(NEW, 8)


def store_far(kv: KVView) -> None:
    ops.store(NEW, NEW, FAR, kv)


def load_far(kv: KVView) -> tuple[Tensor, Tensor | None]:
    return ops.load(FAR, kv)


@pytest.mark.parametrize("arrives", [RuntimeError, IndexError, ValueError])
@pytest.mark.parametrize("error", [ArgumentError, ShapeError, OutOfMemory])
@pytest.mark.parametrize("text", ["{}", "{}\nException raised from store at ...", "call failed: {}"])
def test_the_text_tells_not_the_class(text: str, error: type[KVError], arrives: type[Exception]) -> None:
    told = cpu.refused(arrives(text.format(f"kvloom.errors.{error.__name__}: {SENTENCE}")))
    assert type(told) is error
    assert str(told) == SENTENCE


@pytest.mark.parametrize(
    "text", [SENTENCE, "", "std::bad_alloc", "ValueError: x", "kvloom.errors.StateError: x"]
)
def test_errors_of_others_are_no_refusals(text: str) -> None:
    assert cpu.refused(RuntimeError(text)) is None


@compiled
@pytest.mark.parametrize("call", [store_far, load_far])
@pytest.mark.parametrize("arrives", [RuntimeError, IndexError, ValueError])
def test_a_refusal_that_arrives_as_any_error_is_raised_as_ours(
    arrives: type[Exception], call: Callable[[KVView], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch makes of what C++ throws an error of its own choice, with the same text."""

    def as_another(operator: Callable[..., object]) -> Callable[..., object]:
        def other(*args: object) -> object:
            try:
                return operator(*args)
            except Exception as error:
                raise arrives(str(error)) from None

        return other

    for name in ("store", "load"):
        other = as_another(getattr(schemas, name))
        monkeypatch.setattr(schemas, name, other)
        monkeypatch.setitem(choice._DISPATCHED, name, other)
    with pytest.raises(ArgumentError) as raised:
        call(cache())
    assert str(raised.value) == SENTENCE


@pytest.mark.parametrize("call", [rotate_far, store_far, load_far])
@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel"), IndexError("list index out of range")], ids=repr
)
def test_an_error_that_is_no_refusal_passes_as_it_is(
    error: Exception, call: Callable[[KVView], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> object:
        raise error

    for name in ("rotate", "store", "load"):
        monkeypatch.setattr(schemas, name, broken)
        monkeypatch.setitem(choice._DISPATCHED, name, broken)
    with pytest.raises(type(error)) as raised:
        call(cache())
    assert raised.value is error


def test_rotation_without_memory_is_refused_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> Tensor:
        raise RuntimeError("kvloom.errors.OutOfMemory: what the kernel allocates must fit memory")

    monkeypatch.setattr(schemas, "rotate", full)
    monkeypatch.setitem(choice._DISPATCHED, "rotate", full)
    with pytest.raises(OutOfMemory, match=r"^what the kernel allocates must fit memory$"):
        ops.rotate(NEW, 8)


@compiled
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda *kv: schemas.store(NEW, NEW, FAR, *kv), f"ArgumentError: {SENTENCE}"),
        (lambda *kv: schemas.load(FAR, *kv, torch.float32, 1), f"ArgumentError: {SENTENCE}"),
        (lambda *kv: schemas.copy([kv[0]], FAR, [kv[0]], FAR), f"ArgumentError: source_{SENTENCE}"),
        (lambda *kv: schemas.rotate(NEW, 3),
         "ArgumentError: block must be a power of two of at most 1024 that divides the last dimension"),
        (lambda *kv: schemas.load(FAR[:1], *kv, torch.float32, 2**62),
         "ShapeError: num_repeat times heads must fit 64 bits"),
        (lambda *kv: schemas.load(FAR[:1], *kv, torch.float32, 2**43),
         "OutOfMemory: what the kernel allocates must fit memory"),
    ],
)  # fmt: skip
def test_the_bare_operator_says_which_error_it_means(call: Callable[..., object], said: str) -> None:
    """An IndexError in every torch: what callers see in a compiled graph."""
    with pytest.raises(IndexError) as raised:
        call(*cache().tensors)
    assert str(raised.value) == f"kvloom.errors.{said}"
