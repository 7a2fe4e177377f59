"""Codes in the order of integer dot products: nothing changes but their places."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from ops.attention import Case, make_case, starts_of
from ops.cases import codes
from ops.native import native
from ops.pools import Kind
from oracles.bits import assert_same_bits, generator
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import NATIVE_KEYS, NATIVE_VALUES, CacheLayout
from kvloom.core.specs import CODE_DTYPE
from kvloom.core.views import KVView
from kvloom.ops import Batch, Scores

GROUPS = [
    (64, torch.float16),
    (8, torch.float32),
    (32, torch.bfloat16),
    (8, torch.float16),
    (16, torch.bfloat16),
]
KINDS = [codes(bits, group, dtype) for bits in CODE_DTYPE for group, dtype in GROUPS]


def in_native_order(case: Case, block_size: int = 32) -> Case:
    return dataclasses.replace(case, kv=native(case, block_size))


def attend(case: Case, scores: Scores, spelling: str = "pages") -> Tensor:
    return ops.attend(case.query, case.kv, case.batch(spelling), scores)


def test_the_order_is_that_of_the_decision() -> None:
    """Byte by byte: of keys four of each token side by side, of values each byte of four tokens."""
    slots, width = 32, 32
    key = torch.empty(NATIVE_KEYS.shape(B=1, S=slots, H=2, D=width), dtype=torch.int8)
    value = torch.empty(NATIVE_VALUES.shape(B=1, S=slots, H=2, D=width), dtype=torch.int8)
    assert key.shape == (1, 2, 2, 8, 16, 4)
    assert value.shape == (1, 2, 8, 32, 4, 1)
    scales = (torch.ones(1, 2, 2, 16, 1), torch.ones(1, 2, 8, 4, 1))
    kv = KVView.split(NATIVE_KEYS, key, value, *scales, value_layout=NATIVE_VALUES)
    rows = torch.randint(-127, 128, (slots, 2, width), generator=generator(1)).to(torch.int8)
    plain = KVView.split(CacheLayout("B S H D"), rows[None], rows[None], *[torch.ones(1, slots, 2, 1)] * 2)
    ops.copy(plain, torch.arange(slots), kv, torch.arange(slots))
    for slot, head, d in ((0, 0, 0), (17, 1, 5), (31, 0, 31), (6, 1, 18)):
        assert key[0, head, slot // 16, d // 4, slot % 16, d % 4] == rows[slot, head, d]
        assert value[0, head, slot // 4, d, slot % 4, 0] == rows[slot, head, d]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_store_and_load(kind: Kind, backend: str) -> None:
    """What is stored natively has the codes and scales of what is stored by rows."""
    case = make_case([1], [50], axes="B S H D", kind=kind, dtype=torch.float32, head_dim=64, block_size=16)
    kv = native(case)
    new = torch.randn(9, 2, 64, generator=generator(3))
    slots = torch.tensor([3, 18, -1, 31, 0, 47, 12, 5, 29])
    held = slots[slots >= 0]
    for view in (kv, case.kv):
        ops.store(new, 2 * new, slots, view, full_range=kind.full_range, backend=backend)
    found, expected = ops.load(held, kv, backend=backend), ops.load(held, case.kv, backend="reference")
    for name, x, y in zip(("key", "value"), found, expected, strict=True):
        assert_same_bits(x, y, name)


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes"),
    pairwise(KINDS, [torch.float32, torch.bfloat16, torch.float16], [(64, 4), (128, 3), (192, 1), (320, 8)]),
    ids=str,
)
def test_attention_has_the_bits_of_rows(kind: Kind, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    head_dim, ratio = sizes
    case = make_case([1, 5, 1], [90, 70, 16], axes="B S H D", kind=kind, dtype=dtype, head_dim=head_dim,
                     ratio=ratio, page_size=16, block_size=16)  # fmt: skip
    expected = attend(case, Scores())
    for block_size in (16, 64):
        assert_same_bits(
            attend(in_native_order(case, block_size), Scores()), expected, f"blocks of {block_size}"
        )


@pytest.mark.parametrize(
    ("kind", "dtype", "page_size"),
    pairwise(KINDS[::2], [torch.float32, torch.bfloat16], [1, 3, 8, 16, 24, 48, 256]),
    ids=str,
)
def test_pages_of_any_size(kind: Kind, dtype: torch.dtype, page_size: int) -> None:
    """Pages that cut blocks of 16 apart are read all the same."""
    case = make_case([1, 40], [600, 131], axes="B S H D", kind=kind, dtype=dtype, head_dim=64,
                     page_size=page_size, block_size=page_size)  # fmt: skip
    expected = attend(case, Scores())
    for spelling in ("pages", "tokens"):
        assert_same_bits(attend(in_native_order(case), Scores(), spelling), expected, spelling)


@pytest.mark.parametrize("kind", KINDS[::2], ids=str)
@pytest.mark.parametrize("start", [0, 16, 5])
def test_runs_that_begin_anywhere(kind: Kind, start: int) -> None:
    """One unbounded page, which need not begin with a block."""
    case = make_case([1], [200], axes="B S H D", kind=kind, dtype=torch.bfloat16, head_dim=64,
                     page_size=1, block_size=256, contiguous=True)  # fmt: skip
    case = dataclasses.replace(case, kv=native(case, 256))
    moved = native(case, 256)
    first = case.slots[0][0]
    tokens = torch.arange(200)
    ops.copy(case.kv, tokens + first, moved, tokens + start)
    batches = [
        Batch(CacheIndex.offset(torch.tensor([at])), starts_of([1]), starts_of([200]))
        for at in (first, start)
    ]
    assert_same_bits(
        ops.attend(case.query, moved, batches[1]), ops.attend(case.query, case.kv, batches[0]), "moved"
    )


@pytest.mark.parametrize("kind", KINDS[::2], ids=str)
def test_pages_that_cut_blocks_and_begin_with_one(kind: Kind) -> None:
    """Pages of 24 whose slots lie a multiple of 16 behind their tokens: blocks are still cut apart."""
    size, order = 24, [4, 1, 6, 3, 0]
    case = make_case([1], [110], axes="B S H D", kind=kind, dtype=torch.bfloat16, head_dim=64,
                     page_size=1, block_size=256, contiguous=True)  # fmt: skip
    case = dataclasses.replace(case, kv=native(case, 256))
    cut = native(case, 256)
    tokens = torch.arange(110)
    slots = torch.tensor(order)[tokens // size] * size + tokens % size
    ops.copy(case.kv, tokens + case.slots[0][0], cut, slots)
    pages = CacheIndex.pages(torch.tensor([order]) * size, size)
    out = ops.attend(case.query, cut, Batch(pages, starts_of([1]), starts_of([110])))
    assert_same_bits(out, ops.attend(case.query, case.kv, case.batch("offset")), "cut")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS[::2], ids=str)
@pytest.mark.parametrize("scores", [Scores(window=21), Scores(window=100), Scores(is_causal=False)])
@pytest.mark.parametrize("first_visible", [None, [3, 47]])
def test_hidden_tokens_inside_a_block(
    kind: Kind, dtype: torch.dtype, scores: Scores, first_visible: list[int] | None
) -> None:
    """Blocks of which some tokens are hidden, or hold nothing yet but poison."""
    case = make_case([1, 20], [70, 131], axes="B S H D", kind=kind, dtype=dtype, head_dim=64,
                     page_size=16, block_size=16)  # fmt: skip
    case.first_visible = first_visible
    assert_same_bits(attend(in_native_order(case), scores), attend(case, scores), "native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, -2.0], ids=["nan", "negative"])
def test_scales_that_no_store_makes(dtype: torch.dtype, value: float) -> None:
    """A NaN shows to those who see it; a negative scale of int8 is right all the same."""
    kind = Kind(torch.int8, 8, 32, torch.float32)
    case = make_case([1, 1], [40, 37], axes="B S H D", kind=kind, dtype=dtype, head_dim=64,
                     page_size=16, block_size=16)  # fmt: skip
    kv = in_native_order(case).kv
    slot = case.slots[0][33]
    for view in (kv, case.kv):
        scale = view.tensors[3]
        assert scale is not None
        block, within = divmod(slot, scale.shape[1] * scale.shape[2])
        outer, inner = divmod(within, scale.shape[2])
        scale[block, outer, inner] = value
    out = ops.attend(case.query, kv, case.batch())
    assert_same_bits(out, ops.attend(case.query, case.kv, case.batch()), "native")
    assert out[0].isnan().all() == math.isnan(value)
    assert out[1].isfinite().all()
    reference = ops.attend(case.query, case.kv, case.batch(), backend="reference")
    torch.testing.assert_close(out, reference, atol=0.02, rtol=0.02, equal_nan=True)
