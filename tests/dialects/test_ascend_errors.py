"""``scatter_pa_kv_cache`` refuses arguments that do not fit together, by name, and writes nothing."""

from __future__ import annotations

import re

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import CACHES, keys_only, nz_call, plan_call, standard_plan, token_call
from oracles.pmx_cases import Call
from oracles.rejection import Bad, assert_refused, rows
from torch import Tensor

from kvloom.dialects import ascend
from kvloom.errors import KVError, ShapeError

TENSORS = ("key", "value", *CACHES)
INDEX_NAMES = ("slot_mapping", "compress_lens", "compress_seq_offset", "seq_lens")


def good_tokens() -> Call:
    return token_call(torch.float16, torch.int32, bits.generator(0))


def good_fractal() -> Call:
    return nz_call((torch.float16, torch.float16), torch.int32, bits.generator(0))


def good_strides() -> Call:
    """The memory of key and value ends with their last token."""
    return {**good_tokens(), "scatter_mode": "Nct", "strides": (15, 9), "offsets": (0, 0)}


def good_runs(rule: str, dims: int) -> Call:
    return plan_call(standard_plan(rule), dims, torch.float16, torch.int32, bits.generator(0))


def to(what: str, names: str, dtype: torch.dtype, *of: str) -> Bad:
    return Bad(what, names, lambda c: {name: c[name].to(dtype) for name in of})


def without(name: str, names: str = "") -> Bad:
    return Bad(f"no {name}", names or name, lambda c: {name: None})


def narrower(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1).clone()


def wider(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x.narrow(dim, 0, 1)], dim)


def resized(name: str, dim: int, names: str) -> list[Bad]:
    """One less and one more along ``dim``."""
    return [
        Bad(f"{name} {word} along {dim}", names, lambda c, change=change: {name: change(c[name], dim)})
        for word, change in (("shorter", narrower), ("longer", wider))
    ]


def is_set(what: str, name: str, *values: object, names: str = "") -> list[Bad]:
    return [Bad(f"{what} {value!r}", names or name, lambda c, value=value: {name: value}) for value in values]


def dtypes_of_index(name: str) -> list[Bad]:
    """Index tensors have one dtype, int32 or int64; the good calls have int32."""
    return [
        to(f"{name} of another index dtype", "|".join(INDEX_NAMES), torch.int64, name),
        *(to(f"{name} {dtype}", name, dtype, name) for dtype in (torch.float32, torch.int16)),
    ]


def counts_of_index(name: str) -> list[Bad]:
    """One entry of one (batch, head) run too few and too many."""
    return [
        Bad(f"one too few in {name}", name, lambda c: {name: narrower(c[name].flatten(), 0)}),
        Bad(f"one too many in {name}", name, lambda c: {name: wider(c[name].flatten(), 0)}),
    ]


COMMON = [
    without("key"),
    without("key_cache"),
    without("slot_mapping"),
    without("value", "value|value_cache"),
    without("value_cache", "value|value_cache"),
    Bad("value of rank 0 beside a cache", "value|value_cache", lambda c: {"value": c["value"].new_zeros(())}),
    Bad("value_cache of rank 0", "value_cache|value", lambda c: {"value_cache": c["value"].new_zeros(())}),
    *(
        Bad(f"{name} of rank {rank}", name, lambda c, name=name, at=rank - 3: {name: c[name][(None,) * at]})
        for name in ("key", "value")
        for rank in (5, 6)
    ),
    Bad("key of rank 2", "key", lambda c: {"key": c["key"].flatten(1)}),
    Bad("value of rank 2", "value", lambda c: {"value": c["value"].flatten(1)}),
    Bad("value of rank 4", "value", lambda c: {"value": c["value"][None]}),
    *(Bad(f"{name} of rank 3", name, lambda c, name=name: {name: c[name].flatten(0, 1)}) for name in CACHES),
    *(Bad(f"{name} of rank 6", name, lambda c, name=name: {name: c[name][None, None]}) for name in CACHES),
    *(to(f"{name} of another dtype", "|".join(TENSORS), torch.float32, name) for name in TENSORS),
    to("bfloat16 keys for float16", "|".join(TENSORS), torch.bfloat16, "key"),
    *(
        to(f"{dtype} everywhere", "key|key_cache", dtype, *TENSORS)
        for dtype in (torch.float64, torch.int64, torch.bool, torch.complex64)
    ),
    *(to(f"slot_mapping {dtype}", "slot_mapping", dtype, "slot_mapping")
      for dtype in (torch.float32, torch.int16, torch.bool, torch.uint8)),
    Bad("one head more in value", "key|value", lambda c: {"value": wider(c["value"], 1)}),
    Bad("one token more in value", "key|value", lambda c: {"value": wider(c["value"], 0)}),
    Bad("one slot more", "slot_mapping", lambda c: {"slot_mapping": wider(c["slot_mapping"], 0)}),
    Bad("one slot fewer", "slot_mapping", lambda c: {"slot_mapping": narrower(c["slot_mapping"], 0)}),
    Bad("no slots", "slot_mapping", lambda c: {"slot_mapping": c["slot_mapping"][:0]}),
    *is_set("cache_mode", "cache_mode", "norm", "NORM", "pa_nz", "PA-NZ", "ND", "None", 0),
    *is_set("scatter_mode", "scatter_mode", "none", "rope", "ALIBI", "omni", "nct", "Norm", 1),
    *(Bad(f"{name} on another device", name, lambda c, name=name: {name: c[name].to("meta")})
      for name in ("value", "value_cache", "slot_mapping")),
]  # fmt: skip

TOKENS = [
    *(row for name, own in zip(CACHES, ("key", "value"), strict=True) for dim in (2, 3)
      for row in resized(name, dim, f"{name}|{own}")),
    *(row for dim in (0, 1) for row in resized("value_cache", dim, "value_cache|key_cache")),
    *(Bad(f"{name} of rank 5", name, lambda c, name=name: {name: c[name][None]}) for name in CACHES),
    Bad("value of another dtype than key", "key|value", lambda c: {
        name: c[name].float() for name in ("value", "value_cache")}),
    Bad("fractal mode on a Norm cache", "key_cache|cache_mode", lambda c: {"cache_mode": "PA_NZ"}),
    Bad("NHSD on a Norm cache", "key_cache|scatter_mode", lambda c: {"scatter_mode": "NHSD"}),
    *(Bad(f"{mode} without lengths", "|".join((*INDEX_NAMES, "key_cache")), lambda c, mode=mode: {
        "scatter_mode": mode}) for mode in ("Alibi", "Rope", "Omni")),
]  # fmt: skip

FRACTAL = [
    *(row for name, own in zip(CACHES, ("key", "value"), strict=True) for dim in (1, 3)
      for row in resized(name, dim, f"{name}|{own}")),
    *(row for dim in (0, 2) for row in resized("value_cache", dim, "value_cache|key_cache")),
    *(Bad(f"with {mode}", "scatter_mode|cache_mode", lambda c, mode=mode: {"scatter_mode": mode})
      for mode in ("Alibi", "Rope", "Omni", "Nct", "NHSD")),
    Bad("padded key", "key|cache_mode", lambda c: {"key": c["key"][None], "value": c["value"][None]}),
    Bad("features that fill no piece", "key|key_cache", lambda c: {"key": c["key"][..., :12].clone()}),
    Bad("Norm mode on a fractal cache", "key_cache|cache_mode", lambda c: {"cache_mode": "Norm"}),
    Bad("rank 5 of other heads", "key_cache|key", lambda c: {
        "key_cache": c["key_cache"].reshape(3, 1, 2, 5, 16)}),
    Bad("rank 5 of other pieces", "value_cache|value", lambda c: {
        "value_cache": c["value_cache"].reshape(3, 4, 1, 5, 16)}),
    Bad("rank 5 where heads share pieces", "key_cache|key", lambda c: {
        "key": c["key"].reshape(7, 4, 8), "value": c["value"].reshape(7, 4, 16),
        "key_cache": c["key_cache"].reshape(3, 2, 1, 5, 16)}),
]  # fmt: skip

STRIDES = [
    *is_set("strides", "strides", (15,), (15, 9, 9), (), (0, 9), (15, 0), (-15, 9), (15, -1)),
    *is_set("offsets", "offsets", (0,), (0, 0, 0), (), (-1, 0), (0, -1)),
    *is_set("strides beyond the memory", "strides", (16, 9), (15, 10), (2**62, 9), (2**63 - 1, 9),
            names="strides|offsets|key|value"),
    *is_set("offsets beyond the memory", "offsets", (1, 0), (0, 1), (2**63 - 1, 0),
            names="strides|offsets|key|value"),
    Bad("strides of a key that is a view", "strides|key", lambda c: {
        "key": c["key"].repeat_interleave(2, dim=0)[::2]}),
    Bad("padded key", "scatter_mode|key", lambda c: {"key": c["key"][None], "value": c["value"][None]}),
]  # fmt: skip

RUNS = [
    *(Bad(f"{name} for two heads", name, lambda c, name=name: {name: c[name].expand(-1, -1, 2, -1).clone()})
      for name in CACHES),
    *(row for name, own in zip(CACHES, ("key", "value"), strict=True)
      for row in resized(name, 3, f"{name}|{own}")),
    *(row for dim in (0, 1) for row in resized("value_cache", dim, "value_cache|key_cache")),
    *(row for name in ("slot_mapping", "compress_lens", "seq_lens") for row in dtypes_of_index(name)),
    *(row for name in ("slot_mapping", "compress_lens") for row in counts_of_index(name)),
    without("compress_lens"),
    without("seq_lens"),
    Bad("seq_lens of rank 0", "seq_lens", lambda c: {"seq_lens": c["seq_lens"][0]}),
]  # fmt: skip

OFFSETS = [
    *dtypes_of_index("compress_seq_offset"),
    *counts_of_index("compress_seq_offset"),
    without("compress_seq_offset"),
]

PADDED = [
    *(row for dim in range(3) for row in resized("value", dim, "key|value")),
    Bad("Nct", "scatter_mode|key", lambda c: {"scatter_mode": "Nct", "strides": (15, 9), "offsets": (0, 0)}),
    Bad("NHSD", "scatter_mode|key", lambda c: {"scatter_mode": "NHSD"}),
    Bad("PA_NZ", "cache_mode|key", lambda c: {"cache_mode": "PA_NZ", "scatter_mode": "None"}),
    *(row for row in resized("seq_lens", 0, "seq_lens|compress_lens|slot_mapping")),
]


@rows(COMMON + TOKENS)
def test_tokens_that_do_not_fit(bad: Bad) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_tokens(), bad, KVError)


@rows([bad for bad in COMMON + TOKENS if not re.search("value|everywhere", bad.what)])
def test_keys_alone_that_do_not_fit(bad: Bad) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, keys_only(good_tokens()), bad, KVError)


@rows(FRACTAL)
def test_fractal_caches_that_do_not_fit(bad: Bad) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_fractal(), bad, KVError)


@rows(STRIDES)
def test_strides_that_do_not_fit(bad: Bad) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_strides(), bad, KVError)


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("rule", ["Alibi", "Rope"])
@rows(RUNS)
def test_runs_that_do_not_fit(bad: Bad, rule: str, dims: int) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_runs(rule, dims), bad, KVError)


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("rule", ["Rope", "Omni"])
@rows(OFFSETS)
def test_offsets_that_do_not_fit(bad: Bad, rule: str, dims: int) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_runs(rule, dims), bad, KVError)


@pytest.mark.parametrize("rule", ["Alibi", "Rope"])
@rows(PADDED)
def test_padded_keys_that_do_not_fit(bad: Bad, rule: str) -> None:
    assert_refused(ascend.scatter_pa_kv_cache, good_runs(rule, 4), bad, KVError)


@pytest.mark.parametrize("missing", ["compress_lens", "seq_lens"])
@pytest.mark.parametrize("rule", ["Alibi", "Rope"])
def test_padded_keys_need_lengths_when_the_mode_is_implied(rule: str, missing: str) -> None:
    good = {**good_runs(rule, 4), "scatter_mode": "None"}
    assert_refused(ascend.scatter_pa_kv_cache, good, without(missing), KVError)


@pytest.mark.parametrize("name", ["compress_lens", "compress_seq_offset", "seq_lens"])
@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("value", [[1, 2], (1, 2), 3, "Rope"], ids=repr)
def test_lengths_that_are_no_tensor(value: object, dims: int, name: str) -> None:
    assert_refused(
        ascend.scatter_pa_kv_cache, good_runs("Rope", dims), Bad("", name, lambda _: {name: value}), KVError
    )


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("rule", ["Alibi", "Rope", "Omni"])
def test_no_lengths_of_some_sequences(rule: str, dims: int) -> None:
    good = good_runs(rule, dims)
    empty = Bad("", "seq_lens|compress_lens", lambda c: {"seq_lens": c["seq_lens"][:0]})
    assert_refused(ascend.scatter_pa_kv_cache, good, empty, KVError)


def test_more_heads_than_memory_holds_are_counted_before_they_are_copied() -> None:
    good = good_runs("Alibi", 3)
    lengths = good["compress_lens"].flatten()[:1].expand(len(good["seq_lens"]) << 48)
    with pytest.raises(ShapeError, match="compress_lens must have an entry for each of"):
        ascend.scatter_pa_kv_cache(**good | {"compress_lens": lengths})


def test_the_good_calls_are_accepted() -> None:
    calls = [good_tokens(), keys_only(good_tokens()), good_fractal(), good_strides()]
    calls += [good_runs(rule, dims) for rule in ("Alibi", "Rope", "Omni") for dims in (3, 4)]
    for call in calls:
        ascend.scatter_pa_kv_cache(**call)
