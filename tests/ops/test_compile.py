"""Under torch.compile, without a graph break: the same results and the same bytes in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ops.cases import offset_of
from oracles.bits import assert_same_bits, generator
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ShapeError
from kvloom.ops import Batch, KeyOffset, Scores

pytestmark = pytest.mark.compile

Arguments = dict[str, Any]
Result = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(cache: Tensor, scale: Tensor | None, x: dict[str, Tensor], axes: str) -> Result:
    """One decoding step on one joint cache: store, load, attend, then move three slots up by one."""
    kv = KVView.joint(CacheLayout(axes), cache, scale, layer=1 if "L" in axes else 0)
    ops.store(x["key"], x["value"], x["slots"], kv)
    loaded = ops.load(x["slots"], kv, dtype=torch.float32, num_repeat=2)
    batch = Batch(CacheIndex.pages(x["pages"], 4), x["seqstarts"], x["kvstarts"])
    out = ops.attend(x["query"], kv, batch, Scores(window=6, sinks=x["sinks"]))
    ops.copy(kv, x["slots"], kv, x["slots"] + 1)
    return *loaded, out, ops.load(x["slots"] + 1, kv, dtype=torch.float32)[0]


def arguments(axes: str, quant: QuantSpec | None, slots: int = 24, new: int = 3) -> Arguments:
    """New tensors with the same numbers at each call."""
    rng = generator(slots + new)
    spec = KVSpec(2 if "L" in axes else 1, 2, 8, torch.float32, axes, quant)
    cache, scale = spec.empty(slots, 4 if "B" in axes else None)
    if quant is None:
        cache.copy_(torch.rand(cache.shape, generator=rng))
    else:
        cache.copy_(torch.randint(0, 100, cache.shape, generator=rng))
        scale.copy_(torch.rand(scale.shape, generator=rng))
    x = {
        "key": torch.randn(new, 2, 8, generator=rng),
        "value": torch.randn(new, 2, 8, generator=rng),
        "slots": torch.arange(new) + 4,
        "query": torch.randn(4, 4, 8, generator=rng),
        "pages": torch.tensor([[4, 0, -1], [8, 12, 2]]),
        "seqstarts": torch.tensor([0, 1, 4]),
        "kvstarts": torch.tensor([0, 7, 17]),
        "sinks": torch.randn(4, generator=rng),
    }
    return {"cache": cache, "scale": scale, "x": x, "axes": axes}


def assert_equal_to_eager(compiled: Callable[..., Result], *sizes: tuple[int, int], **how: Any) -> None:
    """Outputs, cache and scale after each of several calls of different sizes."""
    for slots, new in sizes:
        eager_call, compiled_call = (arguments(slots=slots, new=new, **how) for _ in range(2))
        expected, actual = step(**eager_call), compiled(**compiled_call)
        for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(got, want, f"output {number}")
        for name in ("cache", "scale"):
            assert_same_bits(compiled_call[name], eager_call[name], name)


QUANTS = [None, QuantSpec(8, 4), QuantSpec(4, 2, torch.float32)]


@pytest.mark.parametrize(
    ("axes", "quant"),
    [("L 2 T H D", QUANTS[0]), ("B 2 H S D", QUANTS[1]), ("2 B H S/2 D S%2", QUANTS[2])],
    ids=["plain", "int8", "int4"],
)
def test_compiled_step_equals_eager(axes: str, quant: QuantSpec | None) -> None:
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_equal_to_eager(compiled, (24, 3), axes=axes, quant=quant)


def test_compiled_step_takes_other_sizes() -> None:
    """A second size makes the compiler try again with sizes as symbols."""
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_equal_to_eager(compiled, (24, 3), (24, 5), (32, 2), axes="L 2 T H D", quant=None)


def test_step_compiled_with_dynamic_sizes_equals_eager() -> None:
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_equal_to_eager(compiled, (24, 3), (32, 5), axes="L 2 T H D", quant=QUANTS[1])


def test_a_view_that_compiled_code_made_is_checked_outside() -> None:
    cache, new = torch.zeros(2, 8, 2, 8), torch.ones(2, 2, 8)

    def make(cache: Tensor) -> tuple[Tensor, KVView]:
        return cache + 0, KVView.joint(CacheLayout("2 T H D"), cache)

    _, kv = torch.compile(make, backend="aot_eager", fullgraph=True)(cache)
    with pytest.raises(ShapeError, match="value must not overlap kv in memory"):
        ops.store(new, cache[1, 3:5], torch.tensor([0, 1]), kv)
    ops.store(new, new, torch.tensor([0, 1]), kv)
    assert cache.sum() == 2 * new.numel()


def attend_offset(query: Tensor, cache: Tensor, backend: str = "auto") -> Tensor:
    """Two new tokens of nine in offset mode."""
    kv = KVView.joint(CacheLayout("2 T H D"), cache)
    batch = Batch(CacheIndex.offset(torch.tensor([3])), torch.tensor([0, 2]), torch.tensor([0, 9]))
    return ops.attend(query, kv, batch, backend=backend)


@pytest.mark.parametrize(("head_dim", "backend"), [(584, "auto"), (8, "reference"), (584, "reference")])
def test_compiled_attention_by_the_reference_equals_eager(head_dim: int, backend: str) -> None:
    """584 is more than the compiled kernels have room for."""
    rng = generator(head_dim)
    query, cache = torch.randn(2, 4, head_dim, generator=rng), torch.randn(2, 16, 2, head_dim, generator=rng)
    expected = attend_offset(query, cache, "reference")
    compiled = torch.compile(attend_offset, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(query, cache, backend), expected, "output")


def without_offset(query: Tensor, key: Tensor, cache: Tensor, offset: KeyOffset) -> Result:
    """Keys stored without their offset, attended over, and gathered."""
    kv = KVView.joint(CacheLayout("2 T H D"), cache)
    slots = torch.arange(key.shape[0]) + 3
    ops.store(key - offset.at(slots - 3), key, slots, kv)
    batch = Batch(CacheIndex.offset(torch.tensor([3])), torch.tensor([0, 2]), torch.tensor([0, 9]))
    out = ops.attend(query, kv, batch, Scores(positional_bias=offset.bias(query)))
    part = ops.attend_part(query, kv, batch, Scores(positional_bias=offset.bias(query)))
    return out, *part, ops.load(slots, kv, offset=offset, positions=slots - 3)[0]


def test_keys_without_their_offset_compiled_equal_eager() -> None:
    rng = generator(3)
    query, key = torch.randn(2, 4, 16, generator=rng), torch.randn(9, 2, 16, generator=rng)
    offset = offset_of()
    expected = without_offset(query, key, torch.zeros(2, 16, 2, 16), offset)
    compiled = torch.compile(without_offset, backend="aot_eager", fullgraph=True)
    for number, (got, want) in enumerate(
        zip(compiled(query, key, torch.zeros(2, 16, 2, 16), offset), expected, strict=True)
    ):
        assert_same_bits(got, want, f"output {number}")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own imports
def test_step_compiled_by_inductor_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    # Else six programs are compiled to find out which vectors this machine has, for one kernel of torch's.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    assert_equal_to_eager(compiled, (24, 3), axes="L 2 T H D", quant=QuantSpec(8, 4))
