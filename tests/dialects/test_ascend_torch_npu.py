"""The ``torch_npu`` names: argument order, defaults, and code as an NPU user writes it."""

from __future__ import annotations

import inspect

import pytest
import torch
from oracles import bits
from oracles.ascend_cases import (
    CACHES,
    DTYPES,
    assert_same_memory,
    dtype_id,
    fork,
    gather_call,
    keys_only,
    nz_call,
    plan_call,
    settle,
    standard_plan,
    token_call,
)
from oracles.pmx_cases import Call

from kvloom.conform.oracles import ascend as ascend_golden
from kvloom.dialects import ascend
from kvloom.dialects.ascend import torch_npu
from kvloom.errors import KVError

POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
REQUIRED = inspect.Parameter.empty
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)

SCATTER = [
    *((name, POSITIONAL, REQUIRED) for name in ("key", "value", "key_cache", "value_cache", "slot_mapping")),
    *((name, KEYWORD, None) for name in ("compress_lens", "compress_seq_offsets", "seq_lens")),
    ("cache_mode", KEYWORD, "PA_NZ"),
]
GATHER = [
    *((name, POSITIONAL, REQUIRED)
      for name in ("key_cache", "value_cache", "block_tables", "seq_lens", "key", "value")),
    ("seq_offset", KEYWORD, None),
    ("is_seq_lens_cumsum", KEYWORD, False),
]  # fmt: skip
SIGNATURES = {
    "npu_scatter_pa_kv_cache": SCATTER,
    "npu_scatter_pa_kv_cache_functional": SCATTER,
    "npu_scatter_pa_cache": [
        *((name, POSITIONAL, REQUIRED) for name in ("key", "slot_mapping")),
        *((name, KEYWORD, None) for name in ("compress_lens", "compress_seq_offsets", "seq_lens")),
        ("key_cache", KEYWORD, REQUIRED),
    ],
    "_npu_reshape_and_cache": [
        (name, POSITIONAL, REQUIRED) for name in ("key", "value", "key_cache", "value_cache", "slot_indices")
    ],
    "_npu_reshape_and_cache_siso": [
        (name, POSITIONAL, REQUIRED) for name in ("key", "key_cache", "slot_indices")
    ],
    "npu_gather_pa_kv_cache": GATHER,
    "npu_gather_pa_kv_cache_functional": GATHER,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_come_in_the_published_order_with_the_published_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(torch_npu, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in parameters] == SIGNATURES[name]


def test_operator_signature_follows_the_standard() -> None:
    parameters = inspect.signature(ascend.scatter_pa_kv_cache).parameters
    assert list(parameters) == [
        "key", "value", "key_cache", "value_cache", "slot_mapping", "compress_lens", "compress_seq_offset",
        "seq_lens", "cache_mode", "scatter_mode", "strides", "offsets",
    ]  # fmt: skip
    assert [p.default for p in parameters.values()][5:] == [None, None, None, "Norm", "None", None, None]


def norm_call(dtype: torch.dtype) -> Call:
    return {**token_call(dtype, torch.int32, bits.generator(0)), "cache_mode": "Norm"}


def fractal_call(dtype: torch.dtype) -> Call:
    return nz_call((dtype, dtype), torch.int32, bits.generator(0))


def run_call(rule: str, dtype: torch.dtype, mode: str | None = "Norm") -> Call:
    """Scenario 3 with the golden's argument names."""
    call = plan_call(standard_plan(rule), 4, dtype, torch.int64, bits.generator(0), scatter_mode="None")
    return {**call, "cache_mode": mode}


def renamed(call: Call) -> Call:
    """The same call with the plural that torch_npu has, and without the mode that it lacks."""
    call = {name: x for name, x in call.items() if name != "scatter_mode"}
    if "compress_seq_offset" in call:
        call["compress_seq_offsets"] = call.pop("compress_seq_offset")
    return call


def updated(call: Call) -> tuple[Call, set[int]]:
    expected = fork(call)
    return expected, ascend_golden.scatter_pa_kv_cache(**expected)


CALLS = {
    "Norm": norm_call,
    "fractal": fractal_call,
    "with offset": lambda dtype: run_call("Rope", dtype),
    "without offset": lambda dtype: run_call("Alibi", dtype, None),
}
EVERY_CALL = pytest.mark.parametrize("form", CALLS)


@EVERY_CALL
@EVERY_DTYPE
def test_scatter_writes_the_caches(form: str, dtype: torch.dtype) -> None:
    call = CALLS[form](dtype)
    (expected, averaged), actual = updated(call), renamed(fork(call))
    assert torch_npu.npu_scatter_pa_kv_cache(**actual) is None
    for name in CACHES:
        settle(actual[name], expected[name], averaged)
    assert_same_memory(actual, renamed(expected))


@EVERY_CALL
def test_functional_scatter_returns_updated_clones(form: str) -> None:
    call = CALLS[form](torch.float16)
    (expected, averaged), actual = updated(call), renamed(fork(call))
    returned = torch_npu.npu_scatter_pa_kv_cache_functional(**actual)
    assert_same_memory(actual, renamed(call))
    assert isinstance(returned, tuple)
    for name, cache in zip(CACHES, returned, strict=True):
        settle(cache, expected[name], averaged)
        bits.assert_same_bits(cache, expected[name], name)
        assert cache.untyped_storage().data_ptr() != actual[name].untyped_storage().data_ptr()


def test_cache_mode_left_out_means_fractal() -> None:
    call = fractal_call(torch.float16)
    expected, _ = updated(call)
    names = ("key", "value", *CACHES, "slot_mapping")
    torch_npu.npu_scatter_pa_kv_cache(*(call[name] for name in names))
    assert_same_memory(call, expected)


@pytest.mark.parametrize("mode", [None, "Norm"])
def test_cache_mode_none_means_norm(mode: str | None) -> None:
    call = {**norm_call(torch.float16), "cache_mode": mode}
    expected, _ = updated(call)
    torch_npu.npu_scatter_pa_kv_cache(**call)
    assert_same_memory(call, expected)


@EVERY_DTYPE
def test_keys_alone_return_the_cache_they_wrote(dtype: torch.dtype) -> None:
    call = keys_only(norm_call(dtype))
    expected, _ = updated(call)
    returned = torch_npu.npu_scatter_pa_cache(call["key"], call["slot_mapping"], key_cache=call["key_cache"])
    assert returned.data_ptr() == call["key_cache"].data_ptr()
    bits.assert_same_bits(returned, expected["key_cache"], "returned")
    assert_same_memory(call, expected)


@pytest.mark.parametrize("rule", ["Alibi", "Rope"])
def test_padded_keys_alone_are_compressed(rule: str) -> None:
    call = keys_only(run_call(rule, torch.bfloat16))
    expected, averaged = updated(call)
    arguments = renamed(
        {name: x for name, x in call.items() if name not in ("value", "value_cache", "cache_mode")}
    )
    returned = torch_npu.npu_scatter_pa_cache(**arguments)
    settle(returned, expected["key_cache"], averaged)
    bits.assert_same_bits(returned, expected["key_cache"], "returned")
    bits.assert_same_bits(call["key_cache"], expected["key_cache"], "key_cache")


def of_atb(call: Call, *names: str) -> Call:
    """The same call with ATB's name of the slots, and of its arguments those of ``names``."""
    return {"slot_indices": call["slot_mapping"], **{name: call[name] for name in names}}


@pytest.mark.parametrize("form", ["Norm", "fractal"])
@EVERY_DTYPE
def test_reshape_and_cache_tells_the_format_by_the_shapes(form: str, dtype: torch.dtype) -> None:
    call = CALLS[form](dtype)
    (expected, _), actual = updated(call), fork(call)
    assert torch_npu._npu_reshape_and_cache(**of_atb(actual, "key", "value", *CACHES)) is None
    assert_same_memory(actual, expected)
    alone = fork(call)
    assert torch_npu._npu_reshape_and_cache_siso(**of_atb(alone, "key", "key_cache")) is None
    bits.assert_same_bits(alone["key_cache"], expected["key_cache"], "key_cache")
    bits.assert_same_bits(alone["value_cache"], call["value_cache"], "value_cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_indices": torch.tensor([0, 1 << 20])}, "slot_indices must be"),
        ({"slot_indices": torch.tensor([0])}, r"slot_indices must be \[T\] with T=2"),
        ({"slot_indices": torch.tensor([0.0, 1.0])}, "slot_indices must be torch.int64 or torch.int32"),
        ({"key": torch.zeros(1, 2, 2, 4)}, r"key must be \[T, H, D\]"),
        ({"key_cache": None}, "key_cache must be a tensor"),
        ({"value_cache": torch.zeros(3, 4, 2, 5)}, "value_cache must hold 2 heads of 4 elements"),
    ],
)
def test_reshape_and_cache_names_what_does_not_fit(change: Call, message: str) -> None:
    call = {"key": torch.ones(2, 2, 4), "value": torch.ones(2, 2, 4), "slot_indices": torch.tensor([3, -1])}
    call |= {name: torch.zeros(3, 4, 2, 4) for name in CACHES}
    with pytest.raises(KVError, match=message):
        torch_npu._npu_reshape_and_cache(**(call | change))
    assert not any(call[name].any() for name in CACHES)
    if "value_cache" not in change:
        alone = {name: x for name, x in (call | change).items() if "value" not in name}
        with pytest.raises(KVError, match=message):
            torch_npu._npu_reshape_and_cache_siso(**alone)


def test_latents_and_rope_keys_are_stored_as_vllm_ascend_stores_them() -> None:
    latent, rope = torch.randn(3, 1, 512), torch.randn(3, 1, 64)
    caches = [torch.zeros(2, 8, 1, n) for n in (512, 64)]
    slots = torch.tensor([9, 1, -1], dtype=torch.int32)
    torch_npu._npu_reshape_and_cache(
        key=latent, value=rope, key_cache=caches[0], value_cache=caches[1], slot_indices=slots
    )
    joint = torch.zeros(2, 8, 1, 576)
    torch_npu._npu_reshape_and_cache_siso(
        key=torch.cat((latent, rope), dim=2), key_cache=joint, slot_indices=slots
    )
    assert torch.equal(joint, torch.cat(caches, dim=-1))
    assert torch.equal(joint[1, 1, 0, :512], latent[0, 0]) and torch.equal(joint[0, 1, 0, 512:], rope[1, 0])
    assert joint.count_nonzero() == 2 * 576


def gather_of(form: str, dtype: torch.dtype, **options: object) -> Call:
    mode, out_rank = {"Norm": ("Norm", 3), "rows": ("PA_NZ", 2), "heads": ("PA_NZ", 3)}[form]
    rng = bits.generator(1)
    return gather_call(dtype, torch.int32, rng, cache_mode=mode, out_rank=out_rank, **options)


def without_mode(call: Call) -> Call:
    return {name: x for name, x in call.items() if name != "cache_mode"}


@pytest.mark.parametrize("form", ["Norm", "rows", "heads"])
@EVERY_DTYPE
def test_gather_tells_the_format_by_the_shapes(form: str, dtype: torch.dtype) -> None:
    call = gather_of(form, dtype)
    expected, actual = fork(call), without_mode(fork(call))
    ascend_golden.gather_pa_kv_cache(**expected)
    assert torch_npu.npu_gather_pa_kv_cache(**actual) is None
    assert_same_memory(actual, without_mode(expected))


@pytest.mark.parametrize("form", ["Norm", "rows", "heads"])
def test_functional_gather_returns_updated_clones(form: str) -> None:
    call = gather_of(form, torch.float16, cumulative=True)
    call["seq_offset"] = torch.tensor([4, 0, 0], dtype=torch.int32)
    expected, actual = fork(call), without_mode(fork(call))
    ascend_golden.gather_pa_kv_cache(**expected)
    returned = torch_npu.npu_gather_pa_kv_cache_functional(**actual)
    assert_same_memory(actual, without_mode(call))
    assert isinstance(returned, tuple)
    for name, out in zip(("key", "value"), returned, strict=True):
        bits.assert_same_bits(out, expected[name], name)


def test_norm_cache_with_heads_as_wide_as_a_piece_is_no_fractal_cache() -> None:
    call = gather_of("Norm", torch.float16)
    rng = bits.generator(2)
    call |= {name: bits.poison((6, 4, 2, 16), torch.float16, rng) for name in CACHES}
    call |= {name: bits.poison((17, 2, 16), torch.float16, rng) for name in ("key", "value")}
    expected, actual = fork(call), without_mode(fork(call))
    ascend_golden.gather_pa_kv_cache(**expected)
    torch_npu.npu_gather_pa_kv_cache(**actual)
    assert_same_memory(actual, without_mode(expected))


def test_gather_refuses_shapes_of_neither_format() -> None:
    call = without_mode(gather_of("Norm", torch.float16))
    with pytest.raises(KVError, match="key"):
        torch_npu.npu_gather_pa_kv_cache(**{**call, "key": call["key"][:, :1]})


def test_code_written_for_an_npu_runs_as_it_is() -> None:
    """An attention backend: one cache tensor for both halves, padded slots, keywords."""
    num_blocks, block_size, num_kv_heads, head_size = 4, 8, 2, 16
    kv_cache = torch.zeros(2, num_blocks, block_size, num_kv_heads, head_size, dtype=torch.bfloat16)
    key_cache, value_cache = kv_cache[0], kv_cache[1]
    qkv = torch.randn(6, 4 * 16 + 2 * 2 * 16, generator=bits.generator(3)).to(torch.bfloat16)
    _, key, value = qkv.split([4 * 16, 2 * 16, 2 * 16], dim=-1)
    key, value = key.view(-1, num_kv_heads, head_size), value.view(-1, num_kv_heads, head_size)
    slot_mapping = torch.tensor([16, 17, 18, 3, -1, -1], dtype=torch.int32)
    torch_npu.npu_scatter_pa_kv_cache(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        cache_mode="Norm",
    )
    expected = torch.zeros_like(kv_cache)
    expected[0, 2, :3], expected[1, 2, :3] = key[:3], value[:3]
    expected[0, 0, 3], expected[1, 0, 3] = key[3], value[3]
    bits.assert_same_bits(kv_cache, expected, "kv_cache")

    tokens = [torch.empty(4, num_kv_heads, head_size, dtype=torch.bfloat16) for _ in range(2)]
    torch_npu.npu_gather_pa_kv_cache(
        key_cache,
        value_cache,
        torch.tensor([[2, -1], [0, 1]], dtype=torch.int32),
        torch.tensor([0, 3, 4], dtype=torch.int32),
        *tokens,
        seq_offset=torch.tensor([0, 0], dtype=torch.int32),
        is_seq_lens_cumsum=True,
    )
    assert torch.equal(tokens[0][:3], key[:3])
    assert torch.equal(tokens[1][:3], value[:3])
    bits.assert_same_bits(tokens[0][3], kv_cache[0, 0, 0], "key")
