"""The compiled attention over sizes that its kernels treat differently: against float64, and bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from ops.attention import Case, exact, float32_error, make_case, normal, plain
from ops.cases import alone, codes, fewest_tokens_in_tiles, golden, options
from ops.pools import INT8, PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits, generator
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.core.entries import OF_BITS
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView, Side
from kvloom.errors import UnsupportedError
from kvloom.ops import Scores, alibi_slopes
from kvloom.ops.impl import cpu

pytestmark = pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled backend: {cpu.WHY_NOT}")


def attend(case: Case, scores: Scores | None = None, spelling: str = "pages") -> Tensor:
    return ops.attend(case.query, case.kv, case.batch(spelling), scores or Scores(), backend="cpu")


def assert_right(case: Case, scores: Scores | None = None, spelling: str = "pages") -> Tensor:
    scores = scores or Scores()
    out = attend(case, scores, spelling)
    assert bool(out.isfinite().all())
    assert_as_good_as_plain(out, golden(case, scores), plain(case, scores), float32_error(case, scores))
    return out


def test_the_golden_of_this_file_is_that_of_the_others() -> None:
    case = make_case([3, 1], [7, 12])
    scores = Scores(window=5, softcap=3.0, sinks=torch.ones(4), alibi_slopes=alibi_slopes(4))
    torch.testing.assert_close(golden(case, scores), exact(case, scores), rtol=1e-12, atol=1e-12)


# --- numbers ------------------------------------------------------------------------------------------------

WIDTHS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (24, 24), (576, 512)]
each_width = pytest.mark.parametrize(
    ("widths", "kind", "dtype"),
    pairwise(WIDTHS, [*map(Kind, FLOATS), codes(8, 8), codes(4, 8), codes(2, 8)], FLOATS),
    ids=str,
)


@each_width
def test_head_dims(widths: tuple[int, int], kind: Kind, dtype: torch.dtype) -> None:
    head_dim, value_dim = widths
    assert_right(make_case([3, 1], [70, 131], axes="B S H D", kind=kind, dtype=dtype, head_dim=head_dim,
                           value_dim=value_dim, page_size=16, block_size=16))  # fmt: skip


@each_width
def test_head_dims_of_prompts(widths: tuple[int, int], kind: Kind, dtype: torch.dtype) -> None:
    """Many rows meet keys and values by other kernels than a few; the bits are the same.

    In tiles they are those of another number of tokens that is in tiles.
    """
    head_dim, value_dim = widths
    case = make_case([37, 70], [90, 70], axes="B S H D", kind=kind, dtype=dtype, head_dim=head_dim,
                     value_dim=value_dim, page_size=16, block_size=16)  # fmt: skip
    parts = assert_right(case).split(case.new)
    for b, count in enumerate(case.new):
        first = case.stored[b] - count
        in_tiles = fewest_tokens_in_tiles(case) <= count
        for row in (20 if in_tiles else 0, count // 2, count - 1):
            few = attend(alone(case, b, 19 if in_tiles else 1, first + row + 1))
            assert_same_bits(few[-1], parts[b][row], f"sequence {b}, row {row}")


GROUPS = [(bits, 2**i) for bits in OF_BITS for i in range(1, 8) if bits << i >= 8]


@pytest.mark.parametrize(("group", "dtype", "scale_dtype"), pairwise(GROUPS, FLOATS, FLOATS), ids=str)
def test_groups(group: tuple[int, int], dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    kind = codes(*group, scale_dtype)
    assert_right(make_case([2, 1], [66, 90], kind=kind, dtype=dtype, head_dim=128, page_size=8, block_size=8))


def huge(shape: tuple[int, ...], seed: int) -> Tensor:
    """One token beyond the largest float16; queries, whose seeds end with 3, are as usual."""
    x = normal(shape, seed)
    if seed % 10 != 3:
        x[5] *= 2e5
    return x


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"), [(BF16, F16), (F32, F16), (F16, F32), (F16, BF16)], ids=str
)
@pytest.mark.parametrize(
    "kind", [codes(8, 64), codes(8, 8), codes(4, 32), codes(4, 16), codes(2, 16)], ids=str
)
@pytest.mark.parametrize("axes", ["B S H D", "B H S/16 D/4 S%16 D%4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_products_beyond_the_largest_number_become_it(
    kind: Kind, dtype: torch.dtype, scale_dtype: torch.dtype, axes: str, sign: int
) -> None:
    """As loading has it: of the scale's dtype or that of the query, whichever is smaller."""
    kind = codes(kind.bits, kind.group, scale_dtype)
    stored_as = torch.float32 if dtype == torch.float16 else dtype
    case = make_case([3, 1], [70, 50], axes=axes, kind=kind, dtype=stored_as, head_dim=64, page_size=16,
                     block_size=16, fill=huge)  # fmt: skip
    case.query = case.query.to(dtype)
    for scale in case.kv.tensors[2:]:
        assert scale is not None
        scale.mul_(sign)
    largest = min(torch.finfo(dtype).max, torch.finfo(scale_dtype).max)
    assert any(bool((value.abs() == largest).any()) for _, value in case.keys_and_values())
    assert_right(case, Scores(scale=1e-6))


@pytest.mark.parametrize("kind", [codes(8, 64), codes(8, 8)], ids=str)
def test_a_nan_scale_hides_no_large_one(kind: Kind) -> None:
    """Of the keys of one block: everyone sees the large one, and one row the broken one behind it."""
    case = make_case(
        [3], [70], axes="B S H D", kind=kind, dtype=BF16, head_dim=64, page_size=16, block_size=16
    )
    large, broken = (divmod(case.slots[0][t], 16) for t in (66, 69))
    assert case.kv.key.scale is not None
    case.kv.key.scale[large[0]].view(16, 2, -1)[large[1]] = 6e4
    expected = attend(case, Scores(scale=1e-6))
    case.kv.key.scale[broken[0]].view(16, 2, -1)[broken[1]] = math.nan
    out = attend(case, Scores(scale=1e-6))
    assert_same_bits(out[:2], expected[:2], "rows that do not see it")
    assert bool(out[2].isnan().all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kinds", [(codes(8, 64), codes(4, 32)), (codes(4, 64), codes(8, 16)),
                                   (codes(8, 64), Kind(torch.bfloat16)), (Kind(torch.float16), codes(4, 64)),
                                   (PLAIN, Kind(torch.bfloat16))], ids=str)  # fmt: skip
def test_keys_and_values_of_different_kinds(kinds: tuple[Kind, Kind], dtype: torch.dtype) -> None:
    key, value = (make_case([3, 1], [70, 131], axes="B S H D", kind=kind, dtype=dtype, head_dim=64,
                            page_size=16, block_size=16) for kind in kinds)  # fmt: skip
    key.kv = KVView(key.kv.key, value.kv.value)
    assert_right(key)


@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.bfloat16), codes(8, 64), codes(4, 64)], ids=str)
@pytest.mark.parametrize(("kv_heads", "ratio"), [(1, 1), (1, 8), (1, 71), (2, 4), (8, 4), (3, 5), (8, 1)])
def test_query_heads_for_each_key_head(kv_heads: int, ratio: int, kind: Kind) -> None:
    case = make_case([1, 2], [70, 40], kind=kind, dtype=torch.bfloat16, kv_heads=kv_heads, ratio=ratio,
                     head_dim=64, page_size=16, block_size=16)  # fmt: skip
    assert_right(case)


@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.bfloat16), codes(8, 32), codes(4, 32)], ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 511, 512, 513, 1500])
def test_lengths(length: int, kind: Kind) -> None:
    """Chunks are of 64 tokens and partial results of 512: one less, exactly as many, one more."""
    dtype = torch.float32 if kind is PLAIN else torch.bfloat16
    case = make_case([1, min(length, 3), min(length, 33)], [length] * 3, kind=kind, dtype=dtype, head_dim=64,
                     page_size=16, block_size=16)  # fmt: skip
    assert_right(case)


OPTIONS = options(4, 36, 841)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("first_visible", [None, [3, 600, 41]], ids=["all", "first_visible"])
@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.bfloat16), codes(8, 32)], ids=str)
def test_scores(kind: Kind, first_visible: list[int] | None, option: str) -> None:
    dtype = torch.float32 if kind is PLAIN else torch.bfloat16
    case = make_case(
        [1, 5, 30], [70, 700, 71], kind=kind, dtype=dtype, head_dim=64, page_size=8, block_size=16
    )
    case.decoding_batches, case.first_visible = 1, first_visible
    assert_right(case, OPTIONS[option])


# --- bits ---------------------------------------------------------------------------------------------------

NEW, STORED = [1, 5, 40, 1], [600, 70, 131, 1]
KINDS = [
    PLAIN,
    Kind(torch.bfloat16),
    Kind(torch.float16),
    codes(8, 32),
    codes(4, 32),
    codes(8, 8),
    codes(4, 16),
]
AXES = [
    "B S H D",
    "B H S/16 D/4 S%16 D%4",
    "B H S/4 D/1 S%4 D%1",
    "B H S D",
    "B H D/16 S D%16",
    "B (H D/16) S D%16",
    "B H S/8 D S%8",
    "2 B S H D",
    "L H T 2 D",
]
each_kind = pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind in KINDS for dtype in FLOATS[::2]], ids=str
)


def large_case(kind: Kind, dtype: torch.dtype, **how: object) -> Case:
    how = {"page_size": 16, "block_size": 16, "head_dim": 64, "ratio": 4, **how}
    return make_case(NEW, STORED, kind=kind, dtype=dtype, **how)


@each_kind
def test_layouts_have_the_same_bits(kind: Kind, dtype: torch.dtype) -> None:
    expected = attend(large_case(kind, dtype))
    for axes in AXES:
        assert_same_bits(attend(large_case(kind, dtype, axes=axes)), expected, axes)


@each_kind
def test_pages_and_spellings_have_the_same_bits(kind: Kind, dtype: torch.dtype) -> None:
    expected = attend(large_case(kind, dtype))
    for page_size, block_size in ((1, 16), (3, 4), (64, 32), (128, 128), (600, 8)):
        case = large_case(kind, dtype, page_size=page_size, block_size=block_size)
        assert_same_bits(attend(case), expected, f"pages of {page_size}")
    case = large_case(kind, dtype, contiguous=True, page_size=4)
    for spelling in ("offset", "pages", "blocks", "slots", "tokens"):
        assert_same_bits(attend(case, spelling=spelling), expected, spelling)


@each_kind
def test_sequences_alone_have_the_bits_of_the_batch(kind: Kind, dtype: torch.dtype) -> None:
    case = large_case(kind, dtype)
    parts = attend(case).split(NEW)
    for b in range(len(NEW)):
        assert_same_bits(attend(alone(case, b)), parts[b], f"sequence {b}")


@pytest.fixture
def threads_after() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@each_kind
@pytest.mark.usefixtures("threads_after")
def test_threads_have_the_same_bits(kind: Kind, dtype: torch.dtype) -> None:
    case = large_case(kind, dtype, kv_heads=8, head_dim=128)
    torch.set_num_threads(1)
    expected = attend(case)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        for _ in range(3):
            assert_same_bits(attend(case), expected, f"{threads} threads")


@each_kind
@pytest.mark.parametrize("stored", [40, 530])
def test_many_new_tokens_have_the_bits_of_one_after_the_other(
    kind: Kind, dtype: torch.dtype, stored: int
) -> None:
    whole = make_case([40], [stored], kind=kind, dtype=dtype, head_dim=64, page_size=16, block_size=16)
    one_by_one = torch.cat([attend(alone(whole, 0, 1, stored - 39 + i)) for i in range(40)])
    in_one_call = attend(whole)
    for count in (*range(1, 20), 33, 40):
        out = attend(alone(whole, 0, count))
        expected = one_by_one if count < fewest_tokens_in_tiles(whole) else in_one_call
        assert_same_bits(out, expected[40 - count :], f"{count} new tokens")


# --- memory and limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["B S H D", "B H S D", "B H D/8 S D%8"])
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nothing_around_the_tokens_shows(dtype: torch.dtype, head_dim: int, axes: str) -> None:
    """NaN before, behind and between the tokens, and in every slot that holds none."""
    case = make_case([2, 1], [37, 5], axes=axes, dtype=dtype, kind=Kind(dtype), head_dim=head_dim)
    expected = assert_right(case)
    sides = []
    for side in (x.cache for x in case.kv.sides):
        padded = torch.full(
            [n + 1 if i in (0, 3) else n for i, n in enumerate(side.shape)], math.nan, dtype=dtype
        )
        guarded = torch.full((padded.numel() + 128,), math.nan, dtype=dtype)[64:-64].view(padded.shape)
        guarded[: side.shape[0], :, :, : side.shape[3]] = side
        sides.append(guarded[: side.shape[0], :, :, : side.shape[3]])
    case.kv = KVView(*map(Side, sides))
    assert_same_bits(attend(case), expected, "output")


def amid_nan(x: Tensor) -> Tensor:
    """``x`` with NaN before, behind and between its rows and elements."""
    shape = [n + 1 for n in x.shape[:-1]] + [2 * x.shape[-1] + 1]
    base = torch.full(shape, math.nan, dtype=x.dtype)
    view = base[(*(slice(1, None) for _ in x.shape[:-1]), slice(1, None, 2))]
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [PLAIN, codes(8, 8), codes(4, 8), codes(2, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_nothing_around_query_and_biases_shows(head_dim: int, kind: Kind, dtype: torch.dtype) -> None:
    case = make_case([2, 1], [37, 5], kind=kind, dtype=dtype, head_dim=head_dim)
    rng = generator(2)
    biases = [torch.randn(shape, generator=rng) for shape in ((4, 3, 42), (4,), (4,))]
    expected = attend(case, Scores(mask=biases[0], alibi_slopes=biases[1].abs(), sinks=biases[2]))
    case.query = amid_nan(case.query)
    mask, slopes, sinks = map(amid_nan, (biases[0], biases[1].abs(), biases[2]))
    out = attend(case, Scores(mask=mask, alibi_slopes=slopes, sinks=sinks))
    assert bool(out.isfinite().all())
    assert_same_bits(out, expected, "output")


@pytest.mark.parametrize("window", [600, 1000, 1024])
def test_a_window_may_end_and_begin_within_a_partial_result(window: int) -> None:
    """Of 512 tokens each: 600 tokens that end at 1,100 have a share of three."""
    assert_right(make_case([1, 2], [1100, 1530], page_size=16, block_size=16), Scores(window=window))


@pytest.mark.parametrize("kind", [PLAIN, INT8], ids=str)
def test_rows_of_a_token_table_may_begin_anywhere(kind: Kind) -> None:
    case = make_case([2, 1], [37, 5], kind=kind)
    expected, batch = attend(case), case.batch("tokens")
    table = torch.full((2 * batch.index.table.numel() + 9,), -1)
    table[9::2] = batch.index.table
    starts = torch.stack((batch.index.row_starts, torch.zeros(3, dtype=torch.int64)), dim=1)[:, 0]
    spread = ops.Batch(CacheIndex.tokens(table[9::2], starts), batch.seqstarts, batch.kvstarts)
    assert_same_bits(ops.attend(case.query, case.kv, spread, backend="cpu"), expected, "output")


@pytest.mark.parametrize("side", ["key", "value"])
def test_head_dims_beyond_the_limit_are_left_to_the_reference(side: str) -> None:
    widths = {"head_dim": 8, "value_dim": 8, f"{'head' if side == 'key' else 'value'}_dim": 584}
    case = make_case([2, 1], [7, 5], axes="B S H D", **widths)
    with pytest.raises(UnsupportedError, match="head dims up to 576, got 584"):
        attend(case)
    expected = ops.attend(case.query, case.kv, case.batch(), backend="reference")
    assert_same_bits(ops.attend(case.query, case.kv, case.batch()), expected, "output")


def test_layouts_by_hand_are_read_in_place() -> None:
    """No copy of the cache: a change of a stored value shows in the next call."""
    cache = torch.zeros(2, 64, 2, 64)
    kv = KVView.joint(CacheLayout("2 T H D"), cache)
    batch = ops.Batch(CacheIndex.offset(torch.tensor([3])), torch.tensor([0, 1]), torch.tensor([0, 4]))
    assert not ops.attend(torch.ones(1, 4, 64), kv, batch, backend="cpu").any()
    cache[1, 3:7] = 1.0
    assert bool((ops.attend(torch.ones(1, 4, 64), kv, batch, backend="cpu") == 1.0).all())
