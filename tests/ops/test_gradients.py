"""Caches are for inference: nothing stored keeps a graph alive, and attention says that it has none."""

from __future__ import annotations

import pytest
import torch
from ops.attention import make_case
from ops.pools import INT8, PLAIN, Kind, make_pool

from kvloom import ops
from kvloom.errors import UnsupportedError

BACKENDS = ["auto", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_takes_a_query_that_requires_a_gradient(backend: str) -> None:
    case = make_case([2, 1], [4, 3])
    expected = ops.attend(case.query, case.kv, case.batch(), backend=backend)
    out = ops.attend(case.query.requires_grad_(), case.kv, case.batch(), backend=backend)
    assert torch.equal(out.detach(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [PLAIN, INT8], ids=str)
def test_backward_through_attention_is_refused(backend: str, kind: Kind) -> None:
    case = make_case([2, 1], [4, 3], kind=kind)
    out = ops.attend(case.query.requires_grad_(), case.kv, case.batch(), backend=backend)
    with pytest.raises(UnsupportedError, match="no gradient"):
        out.sum().backward()
    assert case.query.grad is None


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own call
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_through_compiled_attention_is_refused(backend: str) -> None:
    case = make_case([2, 1], [4, 3])
    batch = case.batch()

    def attend(query: torch.Tensor) -> torch.Tensor:
        return ops.attend(query, case.kv, batch, backend=backend)

    torch._dynamo.reset()
    query = case.query.clone().requires_grad_()
    with pytest.raises(Exception, match="no gradient"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(query)
    out = torch.compile(attend, backend="aot_eager")(query)
    assert torch.equal(out.detach(), attend(case.query))
    with pytest.raises(UnsupportedError, match="no gradient"):
        out.sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", ["L 2 T H D", "B H S D", "B H S/2 D S%2"])
@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.float16), INT8], ids=str)
def test_stored_tokens_are_detached(backend: str, axes: str, kind: Kind) -> None:
    pool = make_pool(axes, kind)
    kv = pool.view()
    for seed in range(2):
        x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        ops.store(x * 2, x * 3, torch.tensor([1, -1, 5]), kv, backend=backend)
    assert not any(raw.requires_grad for raw in pool.raw.values())
    key, value = ops.load(torch.tensor([1, 5]), kv, dtype=torch.float32, backend=backend)
    assert not key.requires_grad
    assert not value.requires_grad
    pool.remember("key", 1, 2 * x[0].detach())
    assert torch.equal(key[0], pool.recall("key", 1, torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", ["store", "copy"])
def test_autograd_notices_that_a_cache_has_changed(operator: str, backend: str) -> None:
    pool = make_pool("B H S D", PLAIN)
    kv = pool.view()
    weight = torch.ones(8, requires_grad=True)
    loss = (pool.raw["key"] * weight).sum()
    if operator == "store":
        ops.store(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.tensor([3]), kv, backend=backend)
    else:
        ops.copy(kv, torch.tensor([3]), kv, torch.tensor([5]), backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_made_in_inference_mode_is_written_in_it(backend: str) -> None:
    x = torch.ones(1, 2, 8)
    with torch.inference_mode():
        kv = make_pool("B H S D", PLAIN).view()
        ops.store(x, x, torch.tensor([3]), kv, backend=backend)
        ops.copy(kv, torch.tensor([3]), kv, torch.tensor([5]), backend=backend)
        assert torch.equal(ops.load(torch.tensor([5]), kv)[0], x)
