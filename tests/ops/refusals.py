"""A bad call must raise the right error, name its argument, and leave every byte as it was."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom.core.views import KVView, Side
from kvloom.errors import ArgumentError, KVError, UnsupportedError

PARTS = ("key", "value", "key_scale", "value_scale")
Call = dict[str, Any]
Change = Callable[[Call], Call]


@dataclasses.dataclass(frozen=True)
class Bad:
    """One way to be wrong: ``change`` says what to replace in a good call."""

    what: str
    error: type[KVError]
    names: str
    change: Change


def rows(table: list[Bad]) -> pytest.MarkDecorator:
    """Parametrize over ``table``; each row has a name of its own."""
    names = [re.sub(r"\W+", "-", bad.what) for bad in table]
    assert len(set(names)) == len(names), "two rows of one name"
    return pytest.mark.parametrize("bad", table, ids=names)


def tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in an argument, also those within views, batches and scores."""
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def part(call: Call, name: str, **changes: Any) -> Call:
    """Replace fields of the argument ``name``; a changed value may be a function of the old one."""
    old = call[name]
    new = {field: x(getattr(old, field)) if callable(x) else x for field, x in changes.items()}
    return {name: dataclasses.replace(old, **new)}


def views(call: Call, how: Callable[[Tensor], Tensor | None], *names: str, argument: str = "kv") -> Call:
    """Replace tensors of a view, ``PARTS``, by a function of them; what is not there stays so."""
    view: KVView = call[argument]
    key, value, key_scale, value_scale = (
        how(x) if x is not None and name in names else x for name, x in zip(PARTS, view.tensors, strict=True)
    )
    return {argument: KVView(Side(key, key_scale), None if value is None else Side(value, value_scale))}


def assert_refused(operator: Callable[..., object], good: Call, bad: Bad) -> None:
    """The changed call raises, or a view that it needs, and no tensor of either call has changed."""
    seen = [*tensors_of(good)]
    before = [x.clone() for x in seen]
    with pytest.raises(KVError, match=rf"\b({bad.names})\b") as raised:
        call = {**good, **bad.change(good)}
        seen += tensors_of(call)
        before += [x.clone() for x in tensors_of(call)]
        operator(**call)
    assert isinstance(raised.value, bad.error), repr(raised.value)
    for x, old in zip(seen, before, strict=True):
        assert_same_bits(x, old, "argument")


def tensors_of(call: Call) -> Iterator[Tensor]:
    for value in call.values():
        yield from tensors(value)


def other_backends() -> list[Bad]:
    """Backends that are not there, and names that mean nothing."""
    return [Bad("backend triton", UnsupportedError, "backend", lambda c: {"backend": "triton"})] + [
        Bad(f"backend {name!r}", ArgumentError, "backend", lambda c, n=name: {"backend": n})
        for name in ("cuda", "", "AUTO", None)
    ]


def on_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def as_dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)
