"""Attention to a token has the same bits however its text is cut, while there is a BatchInvariance."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch
from ops.attention import Case, make_case
from ops.cases import alone, codes, fewest_tokens_in_tiles, options
from ops.pools import Kind
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom import ops
from kvloom.ops import BatchInvariance, Scores
from kvloom.ops.impl import cpu

BF16 = torch.bfloat16
FLOATS = [Kind(BF16), Kind(torch.float16), Kind(torch.float32)]
KINDS = [*FLOATS, codes(8, 8), codes(8, 32), codes(4, 16), codes(4, 32), codes(2, 8), codes(2, 32)]
TEXT, NEW = 230, 200
"""Tokens of a text; the last 200 are computed in some way."""
CUTS = [[NEW], [1] * 20 + [NEW - 20], [2, 15, 16, 17, 33, 64, 53], [64, 1, 100, 1, 1, 33], [NEW - 17, 17]]

pytestmark = pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled backend: {cpu.WHY_NOT}")


@pytest.fixture
def invariance() -> Iterator[BatchInvariance]:
    with BatchInvariance() as held:
        yield held


def attend(case: Case, scores: Scores) -> Tensor:
    return ops.attend(case.query, case.kv, case.batch(), scores, backend="cpu")


def cut(scores: Scores, first: int, last: int, stored: int) -> Scores:
    """Those of new tokens ``[first, last)``, which see ``stored`` tokens."""
    mask, bias = scores.mask, scores.positional_bias
    if bias is not None:
        bias = replace(bias, coefficients=bias.coefficients[first:last])
    mask = None if mask is None else mask[..., first:last, :stored]
    return replace(scores, mask=mask, positional_bias=bias)


def in_pieces(case: Case, sizes: list[int], scores: Scores) -> Tensor:
    """The only sequence of a case, whose new tokens come in calls of these sizes."""
    rows, first = [], 0
    for size in sizes:
        stored = case.stored[0] - case.new[0] + first + size
        piece = alone(case, 0, size, stored)
        rows.append(attend(piece, cut(scores, first, first + size, stored)))
        first += size
    return torch.cat(rows)


def assert_any_cut(case: Case, scores: Scores | None = None) -> None:
    scores = scores or Scores()
    whole = attend(case, scores)
    for sizes in CUTS[1:]:
        assert_same_bits(in_pieces(case, sizes, scores), whole, f"calls of {sizes}")


def text_of(kind: Kind, **how: object) -> Case:
    how = {"dtype": BF16, "head_dim": 64, "kv_heads": 1, "page_size": 16, "block_size": 16, **how}
    return make_case([NEW], [TEXT], kind=kind, **how)


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
def test_head_dims(head_dim: int, kind: Kind) -> None:
    assert_any_cut(text_of(kind, head_dim=head_dim))


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("kind", [Kind(BF16), codes(8, 8), codes(4, 32)], ids=str)
@pytest.mark.parametrize("ratio", [1, 3, 4, 5, 7, 8])
def test_query_heads_for_each_key_head(ratio: int, kind: Kind) -> None:
    assert_any_cut(text_of(kind, ratio=ratio))


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("kind", [Kind(BF16), codes(8, 8), codes(8, 32)], ids=str)
@pytest.mark.parametrize("name", [x for x in options(4, 1, 1) if "causal" not in x and x != "all"])
def test_scores(name: str, kind: Kind) -> None:
    assert_any_cut(text_of(kind, kv_heads=2), options(4, NEW, TEXT)[name])


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("axes", ["B S H D", "B H S/16 D/4 S%16 D%4", "B H D/16 S D%16"])
@pytest.mark.parametrize("kind", [Kind(BF16), codes(8, 8), codes(8, 32)], ids=str)
def test_layouts(kind: Kind, axes: str) -> None:
    assert_any_cut(text_of(kind, axes=axes))


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("kind", [Kind(BF16), codes(8, 8)], ids=str)
def test_scores_that_rise(kind: Kind) -> None:
    """Weights of early tokens shrink again and again."""
    case = text_of(kind)
    case.query *= torch.linspace(1, 60, NEW)[:, None, None].to(BF16)
    assert_any_cut(case)


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("kind", [Kind(BF16), codes(8, 8), codes(4, 32)], ids=str)
def test_splits_are_merged_alike(kind: Kind) -> None:
    """Of more than 512 stored tokens, those of few new tokens are items of their own."""
    case = make_case([40], [1100], kind=kind, dtype=BF16, head_dim=64, page_size=16, block_size=16)
    whole = attend(case, Scores())
    for sizes in ([1, 16, 17, 6], [24, 1, 15]):
        assert_same_bits(in_pieces(case, sizes, Scores()), whole, f"calls of {sizes}")


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ragged_batches(kind: Kind) -> None:
    """Steps, drafts and prompts in one call have the bits of each sequence alone, token by token."""
    new = [1, 17, 64, 2, 16]
    stored = [90, 40, 64, 33, 300]
    case = make_case(new, stored, kind=kind, dtype=BF16, head_dim=64, page_size=16, block_size=16)
    for b, rows in enumerate(attend(case, Scores()).split(new)):
        one_by_one = in_pieces(alone(case, b), [1] * new[b], Scores())
        assert_same_bits(one_by_one, rows, f"sequence {b}")


@pytest.mark.usefixtures("invariance")
@pytest.mark.parametrize("kind", [Kind(BF16), codes(8, 8)], ids=str)
def test_parts(kind: Kind) -> None:
    """What leaves out newest tokens, and is merged with another part."""

    def parts(new: int, last: int) -> ops.AttendedPart:
        piece = alone(case, 0, new, last)
        old = ops.attend_part(piece.query, piece.kv, piece.batch(), skip=20, backend="cpu")
        return ops.attend_part(
            piece.query, piece.kv, piece.batch(), Scores(window=20), prior=old, backend="cpu"
        )

    case = text_of(kind)
    whole = parts(NEW, TEXT)
    last = TEXT - NEW
    for size in [1, 2, 15, 16, 17, 33, 64]:
        last += size
        for got, expected, name in zip(parts(size, last), whole, ("out", "lse"), strict=True):
            rows = slice(last - size - (TEXT - NEW), last - (TEXT - NEW))
            assert_same_bits(got, expected[rows], f"{name} of {size} tokens")


# --- how long it is there -----------------------------------------------------------------------------------


def is_invariant() -> bool:
    """Whether a cut changes nothing, where kernels of prompts are others."""
    case = text_of(Kind(BF16))
    assert fewest_tokens_in_tiles(case) == 17
    return torch.equal(in_pieces(case, CUTS[1], Scores()), attend(case, Scores()))


on_amx = pytest.mark.skipif(
    cpu.ISA not in ("amx", "amx-emulated"), reason=f"nothing changes on {cpu.ISA}, which has no tiles"
)


@on_amx
def test_it_ends_when_the_last_one_does() -> None:
    assert not is_invariant()
    first, second = BatchInvariance(), BatchInvariance()
    assert is_invariant()
    first.close()
    first.close()
    assert is_invariant()
    second.close()
    assert not is_invariant()


@on_amx
def test_what_is_collected_ends() -> None:
    cycle = [BatchInvariance()]
    cycle.append(cycle)  # type: ignore[arg-type]
    assert is_invariant()
    del cycle
    gc.collect()
    assert not is_invariant()


@on_amx
def test_an_error_ends_it() -> None:
    with pytest.raises(KeyError), BatchInvariance():
        raise KeyError
    assert not is_invariant()


@on_amx
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_a_copy_is_one_more(copied: object) -> None:
    with BatchInvariance() as held:
        other = copied(held)  # type: ignore[operator]
    assert is_invariant()
    other.close()
    assert not is_invariant()
    assert copied(held) is not held  # type: ignore[operator]
    assert not is_invariant()


def test_calls_meanwhile_have_the_bits_of_one_or_the_other() -> None:
    """Another thread begins and ends it all the time."""
    case, done = text_of(Kind(BF16)), Event()
    without = attend(case, Scores())
    with BatchInvariance():
        with_it = attend(case, Scores())

    def change() -> None:
        while not done.is_set():
            BatchInvariance().close()

    thread = Thread(target=change)
    thread.start()
    try:
        outs = [attend(case, Scores()) for _ in range(20)]
    finally:
        done.set()
        thread.join()
    assert all(torch.equal(out, without) or torch.equal(out, with_it) for out in outs)
    assert_same_bits(attend(case, Scores()), without, "afterwards")
