"""``gather_pa_kv_cache`` against the golden, whole storages bit by bit."""

from __future__ import annotations

import pytest
import torch
from campaign import times
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import bits
from oracles.ascend_cases import CACHES, DTYPES, INDICES, assert_gathers, dtype_id, gather_call
from oracles.pmx_cases import Call

from kvloom.dialects import ascend

FORMS = {"Norm": ("Norm", 3), "fractal rows": ("PA_NZ", 2), "fractal heads": ("PA_NZ", 3)}
FORM = pytest.mark.parametrize("form", FORMS)
INVALID = ((4, -1, 6), (-1, -1, -1), (1, 2**31 - 1, -(2**31)))


def call_of(form: str, **options: object) -> Call:
    mode, out_rank = FORMS[form]
    kinds = (torch.bfloat16, torch.int32, bits.generator(0))
    return gather_call(*kinds, cache_mode=mode, out_rank=out_rank, **options)


@pytest.mark.parametrize("index", INDICES, ids=dtype_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@FORM
def test_every_form_matches_the_golden(form: str, dtype: torch.dtype, index: torch.dtype) -> None:
    mode, out_rank = FORMS[form]
    call = gather_call(dtype, index, bits.generator(1), cache_mode=mode, out_rank=out_rank)
    assert_gathers(ascend.gather_pa_kv_cache, call)


@FORM
def test_cumulative_lengths(form: str) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, cumulative=True))


@FORM
@pytest.mark.parametrize("extra", [-1, -9, -15])
def test_short_output_truncates(form: str, extra: int) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, extra=extra))


@FORM
@pytest.mark.parametrize("extra", [0, 1, 20])
def test_rows_past_the_last_token_are_left_alone(form: str, extra: int) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, extra=extra))


@FORM
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_invalid_blocks_give_zeros(form: str, dtype: torch.dtype) -> None:
    mode, out_rank = FORMS[form]
    rng = bits.generator(2)
    call = gather_call(dtype, torch.int32, rng, cache_mode=mode, out_rank=out_rank, tables=INVALID)
    assert_gathers(ascend.gather_pa_kv_cache, call)


@pytest.mark.parametrize("far", [2**63 - 1, -(2**63), 2**40, -(2**32) + 1])
def test_block_ids_of_64_bits_do_not_wrap(far: int) -> None:
    call = gather_call(
        torch.float32, torch.int64, bits.generator(3), tables=((far, 0, 1), (0, 0, 0), (1, far, 2))
    )
    assert_gathers(ascend.gather_pa_kv_cache, call)


@FORM
def test_columns_past_the_table_give_zeros(form: str) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, seq_lens=(6, 20, 13)))


@FORM
def test_table_without_columns_gives_zeros(form: str) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, tables=((), (), ())))


@FORM
@pytest.mark.parametrize("offsets", [(0, 0, 0), (4, 0, 8), (3, 5, 7), (100, 4, 2**31 - 1)])
def test_offset_skips_whole_columns(form: str, offsets: tuple[int, ...]) -> None:
    call = call_of(form)
    assert_gathers(
        ascend.gather_pa_kv_cache, {**call, "seq_offset": torch.tensor(offsets, dtype=torch.int32)}
    )


def test_offset_with_cumulative_lengths() -> None:
    call = call_of("Norm", cumulative=True)
    assert_gathers(
        ascend.gather_pa_kv_cache, {**call, "seq_offset": torch.tensor([9, 0, 4], dtype=torch.int32)}
    )


@FORM
def test_no_sequences_change_nothing(form: str) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, seq_lens=(), tables=()))


@FORM
def test_empty_sequences_change_nothing(form: str) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, seq_lens=(0, 0, 0)))


@FORM
def test_output_without_rows(form: str) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, extra=-15))


@FORM
def test_cache_without_blocks_gives_zeros(form: str) -> None:
    call = call_of(form)
    assert_gathers(ascend.gather_pa_kv_cache, {**call, **{name: call[name][:0] for name in CACHES}})


@FORM
def test_shared_blocks_are_read_by_every_sequence(form: str) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, call_of(form, tables=((4, 4, 2), (0, 0, 0), (4, 2, 4))))


@pytest.mark.parametrize("mode", [None, ""])
def test_absent_cache_mode_means_norm(mode: str | None) -> None:
    assert_gathers(ascend.gather_pa_kv_cache, {**call_of("Norm"), "cache_mode": mode})


@FORM
def test_caches_may_be_views_of_a_pool(form: str) -> None:
    call = call_of(form)
    call |= {name: call[name].repeat_interleave(2, dim=0)[1::2] for name in CACHES}
    assert_gathers(ascend.gather_pa_kv_cache, call)


@FORM
def test_outputs_may_be_parts_of_a_buffer(form: str) -> None:
    call = call_of(form)
    call |= {name: call[name].repeat_interleave(2, dim=0)[::2] for name in ("key", "value")}
    assert_gathers(ascend.gather_pa_kv_cache, call)


def test_defaults_are_plain_lengths_and_norm() -> None:
    call = call_of("Norm")
    del call["cache_mode"], call["is_seq_lens_cumsum"]
    assert_gathers(ascend.gather_pa_kv_cache, call)


@settings(max_examples=times(80))
@given(data=st.data())
def test_any_table_lengths_and_offsets(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(FORMS)))
    seq_lens = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4)))
    width = data.draw(st.integers(0, 4))
    row = st.tuples(*[st.integers(-2, 7)] * width)
    call = gather_call(
        data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(INDICES)), bits.generator(4),
        cache_mode=FORMS[form][0], out_rank=FORMS[form][1], seq_lens=seq_lens,
        extra=data.draw(st.integers(-sum(seq_lens), 5)), cumulative=data.draw(st.booleans()),
        tables=tuple(data.draw(row) for _ in seq_lens), block_size=data.draw(st.integers(1, 5)),
    )  # fmt: skip
    if data.draw(st.booleans()):
        offsets = [data.draw(st.integers(0, 20)) for _ in seq_lens]
        call["seq_offset"] = torch.tensor(offsets, dtype=call["seq_lens"].dtype)
    assert_gathers(ascend.gather_pa_kv_cache, call)
