"""Index values out of range are refused by name and place, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import (
    gather_call,
    keys_only,
    nhsd_call,
    nz_call,
    plan_call,
    standard_plan,
    token_call,
)
from oracles.pmx_cases import Call, with_copies
from oracles.rejection import Bad, assert_refused, rows
from torch import Tensor

from kvloom.dialects import ascend
from kvloom.errors import KVError

FAR = 2**63 - 1


def tokens_of(scenario: str) -> Call:
    rng = bits.generator(0)
    if scenario == "PA_NZ":
        return nz_call((torch.int8, torch.int8), torch.int64, rng)
    call = (
        nhsd_call(torch.int8, torch.int64, rng)
        if scenario == "NHSD"
        else token_call(torch.int8, torch.int64, rng)
    )
    return keys_only(call) if scenario == "keys only" else call


def good_runs(rule: str, dims: int) -> Call:
    """All runs start at slot 0, so that any one value can be changed; 3 heads, 5, 0, 4 and 3 tokens."""
    call = plan_call(standard_plan(rule), dims, torch.bfloat16, torch.int64, bits.generator(0))
    return {**call, "slot_mapping": torch.zeros_like(call["slot_mapping"])}


def put(x: Tensor, **places: int) -> Tensor:
    """A copy with some values replaced: ``_3=7`` writes 7 to the flat index 3."""
    x = x.clone()
    for place, value in places.items():
        x.view(-1)[int(place[1:])] = value
    return x


def bad(what: str, name: str, names: str = "", **places: int) -> Bad:
    return Bad(f"{name} {what}", names or name, lambda c: {name: put(c[name], **places)})


SLOTS = [
    bad("just beyond", "slot_mapping", _3=15),
    bad("in the block after the last", "slot_mapping", _0=19),
    bad("far beyond", "slot_mapping", _6=FAR),
    bad("beyond 32 bits", "slot_mapping", _2=2**32),
    bad("beyond 32 bits, negative when cut", "slot_mapping", _2=2**31),
]
ANY_RUN = [
    bad("beyond the cache", "slot_mapping", _6=10**6),
    bad("INT64_MAX", "slot_mapping", _0=FAR),
    bad("whose end wraps around", "slot_mapping", _0=FAR - 2),
    bad("negative", "compress_lens", _2=-1),
    bad("longer than the sequence", "compress_lens", "compress_lens|compress_seq_offset", _2=6),
    bad("of an empty sequence", "compress_lens", "compress_lens|compress_seq_offset", _3=1),
    bad("INT64_MAX", "compress_lens", "compress_lens|compress_seq_offset", _0=FAR),
    bad("negative", "seq_lens", _0=-1),
    bad("INT64_MAX", "seq_lens", _1=FAR),
    bad("INT64_MIN", "seq_lens", _1=-FAR - 1),
]
WINDOWS = [
    bad("below -1", "compress_seq_offset", _0=-2),
    bad("INT64_MIN", "compress_seq_offset", _0=-FAR - 1),
    bad("whose window ends late", "compress_seq_offset", "compress_seq_offset|compress_lens", _0=4),
    bad("beyond the sequence", "compress_seq_offset", "compress_seq_offset|compress_lens", _0=6),
    bad("INT64_MAX", "compress_seq_offset", "compress_seq_offset|compress_lens", _0=FAR),
]
PACKED = [
    bad("that add up to less", "seq_lens", "seq_lens|key", _1=-1),
    bad("that add up to more", "seq_lens", "seq_lens|key", _1=1),
    bad("negative but adding up", "seq_lens", _0=10, _1=-5),
    bad("that wrap around to the sum", "seq_lens", _0=FAR, _1=FAR, _2=11),
]
PADDED = [bad("longer than the padding allows", "seq_lens", "seq_lens|key", _0=8)]


@pytest.mark.parametrize("scenario", ["Norm", "keys only", "PA_NZ", "NHSD"])
@rows(SLOTS)
def test_slots_out_of_range(bad: Bad, scenario: str) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, tokens_of(scenario), bad, KVError)


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
@rows(ANY_RUN)
def test_runs_out_of_range(bad: Bad, rule: str, dims: int) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_runs(rule, dims), bad, KVError)


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("rule", ["Rope", "Omni"])
@rows(WINDOWS)
def test_windows_out_of_range(bad: Bad, rule: str, dims: int) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_runs(rule, dims), bad, KVError)


@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
@rows(PACKED)
def test_lengths_that_do_not_add_up(bad: Bad, rule: str) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_runs(rule, 3), bad, KVError)


@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
@rows(PADDED)
def test_lengths_beyond_the_padding(bad: Bad, rule: str) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_runs(rule, 4), bad, KVError)


@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
def test_run_ending_one_slot_beyond_the_cache(rule: str) -> None:
    good = good_runs(rule, 3)
    plan, cache = standard_plan(rule), good["key_cache"]
    run = 1  # of 3, 5 and 5 slots
    start = cache.shape[0] * cache.shape[1] - plan.lengths()[run]
    ascend.scatter_pa_kv_cache(**with_copies(good, slot_mapping=put(good["slot_mapping"], _1=start)))
    late = bad("one late", "slot_mapping", "slot_mapping|key_cache", _1=start + 1)
    assert_refused(ascend.scatter_pa_kv_cache, good, late, KVError)


def test_message_names_the_token() -> None:
    call = tokens_of("Norm")
    with pytest.raises(KVError, match=r"slot_mapping.*\b3\b"):
        ascend.scatter_pa_kv_cache(**{**call, "slot_mapping": put(call["slot_mapping"], _3=1500)})


def test_message_names_the_run() -> None:
    call = good_runs("Alibi", 3)
    with pytest.raises(KVError, match=r"slot_mapping.*(\b7\b|\b2\b.*\b1\b)"):
        ascend.scatter_pa_kv_cache(**{**call, "slot_mapping": put(call["slot_mapping"], _7=1500)})


def test_one_bad_slot_keeps_every_good_token_out() -> None:
    for scenario in ("Norm", "PA_NZ", "NHSD"):
        assert_refused(
            ascend.scatter_pa_kv_cache, tokens_of(scenario), bad("last", "slot_mapping", _6=15), KVError
        )


def good_gather(form: str) -> Call:
    mode = "Norm" if form == "Norm" else "PA_NZ"
    return gather_call(torch.float16, torch.int64, bits.generator(0), cache_mode=mode, out_rank=3)


GATHER = [
    *(Bad(f"no {name}", name, lambda c, name=name: {name: None})
      for name in ("key_cache", "value_cache", "block_tables", "seq_lens", "key", "value")),
    *(Bad(f"{name} of another dtype", "key|value|key_cache|value_cache", lambda c, name=name: {
        name: c[name].float()}) for name in ("key", "value", "key_cache", "value_cache")),
    *(Bad(f"{name} float", name, lambda c, name=name: {name: c[name].float()})
      for name in ("block_tables", "seq_lens")),
    *(Bad(f"cache_mode {mode!r}", "cache_mode", lambda c, mode=mode: {"cache_mode": mode})
      for mode in ("norm", "pa_nz", "ND")),
    Bad("key of other heads", "key|key_cache", lambda c: {"key": c["key"][:, :1].clone()}),
    Bad("value of other features", "value|value_cache", lambda c: {"value": c["value"][..., :-1].clone()}),
    Bad("key_cache of rank 3", "key_cache", lambda c: {"key_cache": c["key_cache"][0]}),
    Bad("value_cache of rank 3", "value_cache", lambda c: {"value_cache": c["value_cache"][0]}),
    Bad("key of rank 1", "key", lambda c: {"key": c["key"].flatten()}),
    Bad("block_tables of rank 1", "block_tables", lambda c: {"block_tables": c["block_tables"][0]}),
    Bad("one table too few", "block_tables|seq_lens", lambda c: {"block_tables": c["block_tables"][:2]}),
    Bad("one length too few", "block_tables|seq_lens", lambda c: {"seq_lens": c["seq_lens"][:2]}),
    Bad("lengths that lack the leading 0", "seq_lens|block_tables", lambda c: {"is_seq_lens_cumsum": True}),
    Bad("seq_lens of rank 2", "seq_lens", lambda c: {"seq_lens": c["seq_lens"][None]}),
    Bad("seq_lens negative", "seq_lens", lambda c: {"seq_lens": put(c["seq_lens"], _1=-1)}),
    Bad("cumulative lengths that decrease", "seq_lens", lambda c: {
        "seq_lens": torch.tensor([0, 6, 5, 9]), "is_seq_lens_cumsum": True}),
    Bad("cumulative lengths that begin late", "seq_lens", lambda c: {
        "seq_lens": torch.tensor([1, 6, 6, 9]), "is_seq_lens_cumsum": True}),
    Bad("one offset too few", "seq_offset", lambda c: {"seq_offset": torch.tensor([0, 0])}),
    Bad("seq_offset float", "seq_offset", lambda c: {"seq_offset": torch.zeros(3)}),
    Bad("seq_offset negative", "seq_offset", lambda c: {"seq_offset": torch.tensor([0, -4, 0])}),
]  # fmt: skip


@pytest.mark.parametrize("form", ["Norm", "fractal"])
@rows(GATHER)
def test_gather_of_what_does_not_fit(bad: Bad, form: str) -> None:
    assert_refused(ascend.gather_pa_kv_cache, good_gather(form), bad, KVError)
