"""What a bad argument raises inside ``torch.compile``: less than outside, and never silence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import assert_same_memory, fork, token_call
from oracles.pmx_cases import Call, Numerics, attention_call, random_batch

from kvloom import ops
from kvloom.dialects import ascend, pmx
from kvloom.errors import ArgumentError

pytestmark = pytest.mark.compile

attention = pmx.dynamic_batching.multi_head_cache_attention
REFUSED = (
    IndexError if ops.cpu_kernels() else ArgumentError
)  # no torch makes a class of ours of what C++ throws


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def attention_over_pages() -> Call:
    batch = random_batch("page", 3, (1, 3, 0), (4, 0, 2), random.Random(0))
    return attention_call(batch, Numerics(torch.float32, torch.float32), bits.generator(0))


def test_a_shape_is_refused_in_our_words_before_anything_runs() -> None:
    call = attention_over_pages()
    call["query"] = call["query"][:, :1]
    after = fork(call)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"query must be \[T, Hq, D\] with Hq=2"):
        compiled(attention)(**after)
    assert_same_memory(after, call)


def test_a_slot_outside_is_refused_by_the_kernel() -> None:
    call = token_call(torch.float16, torch.int64, bits.generator(0))
    call["slot_mapping"][3] = 99
    after = fork(call)
    with pytest.raises(REFUSED, match=r"slots must be in \[0, 15\), got 99 for token 3"):
        compiled(ascend.scatter_pa_kv_cache)(**after)
    assert_same_memory(after, call)


def test_an_index_outside_is_refused_by_the_kernel_that_reads_it() -> None:
    """The store before it has happened: the operator cannot look at values that do not exist yet."""
    call = attention_over_pages()
    call["kvstarts"] = call["kvstarts"] + torch.tensor([0, 0, 0, 50])
    with pytest.raises(REFUSED, match=r"index must have \d+ pages of \d+ for the 52 tokens of sequence 2"):
        compiled(attention)(**call)
