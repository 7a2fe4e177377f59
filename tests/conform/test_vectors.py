"""The published vectors: how many, of what, the same from their seed, and in the schema that is published."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from campaign import is_whole

pytest.importorskip("safetensors")
from torch import Tensor

from kvloom.cli import main
from kvloom.conform import vectors
from kvloom.conform.comparing import agrees, words
from kvloom.conform.describe import Call, Operator, Results, problems, result_shape
from kvloom.conform.judging import named
from kvloom.conform.mistakes import MISTAKES
from kvloom.conform.operators import OPERATORS
from kvloom.conform.outcomes import Unsupported
from kvloom.conform.reports import without_cause
from kvloom.conform.running import run
from kvloom.conform.vectors import Vector, make, published, read
from kvloom.errors import ArgumentError

COUNT = None if is_whole() else 30
"""Legal vectors of each dialect that are made again; ``--campaign`` makes all."""
INDEX = json.loads((published() / "index.json").read_text(encoding="utf-8"))


def test_there_are_enough_and_they_are_small(capsys: pytest.CaptureFixture[str]) -> None:
    legal, refused = (sum(each[k] for each in INDEX["dialects"].values()) for k in ("legal", "refused"))
    assert set(INDEX["dialects"]) == set(OPERATORS) and len(OPERATORS) >= 10
    assert legal + refused >= 1500 and refused >= 200
    nbytes = sum(file.stat().st_size for file in published().iterdir())
    assert nbytes <= 20e6
    assert main(["conform", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{len(OPERATORS)} dialects, {legal + refused:,} vectors, {refused} of them calls" in out


def test_without_a_checkout_they_are_those_of_their_distribution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = published()
    monkeypatch.setattr(vectors, "_IN_CHECKOUT", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "kvloom_conform", None)
    assert main(["conform", "list"]) == 2
    assert capsys.readouterr().err == "kvloom: this needs kvloom_conform: pip install kvloom-conform\n"
    assert main(["conform", "vectors", str(tmp_path), "--dialect", "vllm.copy_blocks", "--count", "2"]) == 0
    monkeypatch.delitem(sys.modules, "kvloom_conform")
    monkeypatch.syspath_prepend(here.parents[1])
    assert published().samefile(here) and vectors.PUBLISHED == published()


def test_their_distribution_has_the_version_of_the_set() -> None:
    projects = Path(__file__).parents[2]
    written = (projects / "vectors/pyproject.toml").read_text(encoding="utf-8")
    wanted = (projects / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{vectors.VERSION}.' in written
    assert f'"kvloom-conform>={vectors.VERSION},<{vectors.VERSION + 1}"' in wanted


@pytest.mark.parametrize("dialect", OPERATORS)
def test_they_come_from_their_seed_and_the_description_agrees(dialect: str) -> None:
    operator, every = OPERATORS[dialect], [*read(published(), dialect)]
    assert all(bool(problems(operator, x.call)) == (x.expected is None) for x in every)
    legal, refused = ([x for x in every if (x.expected is None) == y] for y in (False, True))
    for stored, new in zip(legal[:COUNT] + refused, make(dialect, count=COUNT), strict=True):
        assert (stored.about, stored.refused) == (new.about, new.refused)
        assert stored.name == new.name or new.expected is None
        for x, y in ((stored.call, new.call), (stored.expected or {}, new.expected or {})):
            a, b = named(x), named(y)
            assert a.keys() == b.keys()
            for name, value in a.items():
                if isinstance(value, Tensor):
                    other = (
                        b[name].float()
                        if b[name].dtype == torch.float64 and x is not stored.call
                        else b[name]
                    )
                    assert value.stride() == other.stride() or x is not stored.call
                    assert torch.equal(words(value), words(other)), f"{stored.name} {name}"
                else:
                    assert value == b[name]


@pytest.mark.parametrize("dialect", OPERATORS)
def test_manifests_are_in_the_schema(dialect: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((published().parent / "schema.json").read_text(encoding="utf-8"))
    manifest = json.loads((published() / f"{dialect}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(manifest)


def test_there_are_edge_values_strides_and_codes() -> None:
    found = set()
    for vector in read(published(), "pmx.key_value_cache"):
        new = vector.call.get("current_key")
        if vector.expected is None or not isinstance(new, Tensor):
            continue
        found |= {f"int{vector.call.get('quant_bit', 0)}"} | (
            {"strided"} if not new.is_contiguous() else set()
        )
        if new.is_floating_point():
            tiny = torch.finfo(new.dtype).tiny
            x = new.double()
            kinds = {"nan": x.isnan(), "inf": x.isinf(), "subnormal": (x != 0) & (x.abs() < tiny)}
            kinds["largest"] = x.abs() == torch.finfo(new.dtype).max
            kinds["-0"] = (new == 0) & new.signbit()
            found |= {name for name, has in kinds.items() if bool(has.any())}
    assert found >= {"int0", "int4", "int8", "strided", "nan", "inf", "subnormal", "largest", "-0"}


def test_more_come_from_another_seed(tmp_path: Path) -> None:
    options = ["--dialect", "onnx.tensor_scatter", "--seed", "7", "--count", "5"]
    assert main(["conform", "vectors", str(tmp_path), *options]) == 0
    vectors = list(read(tmp_path, "onnx.tensor_scatter"))
    assert sum(vector.expected is not None for vector in vectors) == 5
    first = next(iter(read(published(), "onnx.tensor_scatter")))
    assert (
        vectors[0].about != first.about
        or vectors[0].call["past_cache"].shape != first.call["past_cache"].shape
    )


def test_files_that_were_changed_are_refused(tmp_path: Path) -> None:
    assert main(["conform", "vectors", str(tmp_path), "--dialect", "vllm.copy_blocks", "--count", "2"]) == 0
    file = tmp_path / "vllm.copy_blocks.json"
    file.write_text(file.read_text(encoding="utf-8").replace("layers", "layer_"), encoding="utf-8")
    with pytest.raises(ArgumentError, match="the hash of the manifest differs"):
        list(read(tmp_path, "vllm.copy_blocks"))
    with pytest.raises(ArgumentError, match="dialect must be one of"):
        list(read(tmp_path, "onnx.attention"))


@pytest.mark.parametrize("dialect", OPERATORS)
def test_every_operator_is_described(dialect: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "describe", dialect]) == 0
    out = capsys.readouterr().out
    assert all(argument.name in out for argument in OPERATORS[dialect].arguments)
    assert all(f"-> {name}" in out for name in (*OPERATORS[dialect].outputs, *OPERATORS[dialect].updated))


@pytest.mark.parametrize("dialect", OPERATORS)
def test_results_have_the_axes_that_are_described(dialect: str) -> None:
    operator = OPERATORS[dialect]
    for vector in read(published(), dialect):
        for name, x in (vector.expected or {}).items():
            base = name.partition(".")[0]
            if "@" in name or base not in operator.outputs:
                continue
            assert any(len(form.split()) == x.ndim for form in operator.axes[base].split("|"))
            if base == name:
                assert result_shape(operator, name, vector.call) == list(x.shape), vector.name


def test_described_shapes_count_history_and_repeated_heads(capsys: pytest.CaptureFixture[str]) -> None:
    main(["conform", "describe", "pmx.key_value_cache"])
    main(["conform", "describe", "pmx.dynamic_batching.key_value_cache"])
    main(["conform", "describe", "microsoft.group_query_attention"])
    out = capsys.readouterr().out
    assert "[B start_pos+S H*num_repeat D]" in out and "[kvstarts[B] H*num_repeat D]" in out
    assert "behind what is stored of a row, 0 is right, too" in out


def legal(dialect: str) -> list[Vector]:
    return [vector for vector in read(published(), dialect) if vector.expected is not None]


def test_pages_start_at_any_slot_and_offsets_come_in_any_order() -> None:
    calls = [v.call for v in legal("pmx.dynamic_batching.key_value_cache")]
    tables = [(call["cachestarts"], call["page_size"]) for call in calls]
    firsts = [(x[(x >= 0) & (x < 1 << 40)], size) for x, size in tables if x.ndim == 2]
    assert sum(bool((x % size).any()) for x, size in firsts) > 20
    assert sum(bool((x.diff() < 0).any()) for x, _ in tables if x.ndim == 1) > 20


def test_entries_read_what_entries_behind_them_write() -> None:
    for dialect in OPERATORS:
        if "dynamic_batching" in dialect:
            assert sum(" reads what entry " in v.about for v in legal(dialect)) > 20


def test_negative_slots_are_others_than_minus_one() -> None:
    for dialect in ("ascend.scatter_pa_kv_cache", "vllm.reshape_and_cache", "vllm.reshape_and_cache_flash"):
        slots = torch.cat([v.call["slot_mapping"].reshape(-1).long() for v in legal(dialect)])
        assert len(slots[slots < 0].unique()) > 3


def test_attributes_are_left_out_and_given_other_values() -> None:
    vectors = legal("microsoft.group_query_attention")
    assert sum(v.call.get("softcap", 0.0) > 0 for v in vectors) > 20
    assert sum("scale" in v.call for v in vectors) > 10
    calls = [v.call for v in legal("pmx.key_value_cache")]
    for name, default in (("num_layer", 1), ("layer_idx", 0), ("quant_bit", 0), ("num_repeat", 1)):
        assert any(name not in call for call in calls)
        assert any(call.get(name, default) != default for call in calls)


CODED = [name for name in OPERATORS if "pmx." in name and "cache" in name] + [
    "microsoft.group_query_attention"
]


@pytest.mark.parametrize("dialect", CODED)
def test_codes_tell_a_quotient_from_a_product_with_the_reciprocal(dialect: str) -> None:
    """Scales that are powers of two do not: both are the same number then."""
    operator = OPERATORS[dialect]
    other = {"multiplied by a reciprocal", "divided by the scale"}
    mistakes = [each for each in MISTAKES if each.name in other]
    told, all_told = 0, 0
    for vector in legal(dialect):
        call = operator.complete(vector.call)
        if not (call.get("quant_bit") or call.get("kv_cache_bit_width")):
            continue
        all_told += 1
        for mistake in mistakes:
            wrong = mistake.wrong(operator, call, {n: x.clone() for n, x in (vector.expected or {}).items()})
            told += wrong is not None and not agrees(operator, vector.expected or {}, wrong)
    assert told > all_told / 40 and told >= 2


def test_first_prompts_are_padded_and_store_their_padding() -> None:
    stored = 0
    for vector in legal("microsoft.group_query_attention"):
        count, lengths = vector.call["query"].shape[1], (vector.call["seqlens_k"] + 1).tolist()
        if count == 1 or int(vector.call["total_sequence_length"]) != count:
            continue
        for b, length in enumerate(lengths):
            assert vector.expected is not None
            padding = vector.expected["present_key@padding"][b]
            assert not padding[:, :count].any() and padding[:, count:].all()
            if length < count and vector.call["past_key"].dtype == torch.float32:
                keys = vector.call["key"][b].unflatten(1, (vector.call["kv_num_heads"], -1)).transpose(0, 1)
                assert torch.equal(vector.expected["present_key"][b, :, :count], keys)
                stored += 1
    assert stored > 10


def test_masks_are_of_every_kind_and_shape() -> None:
    for dialect in ("onnx.attention_23", "onnx.attention", "onnx.attention_25"):
        calls = [vector.call for vector in legal(dialect)]
        masks = [call["attn_mask"] for call in calls if "attn_mask" in call]
        kinds = {"boolean": 0, "float": 0, "integer": 0}
        for mask in masks:
            is_float = mask.is_floating_point()
            kinds["boolean" if mask.dtype == torch.bool else "float" if is_float else "integer"] += 1
        assert min(kinds.values()) > 0 and {mask.ndim for mask in masks} == {1, 2, 3, 4}
        assert {call.get("qk_matmul_output_mode") for call in calls} == {None, 0, 1, 2, 3}
        narrow = [c for c in calls if "attn_mask" in c and c["attn_mask"].shape[-1] < _num_keys(c)]
        assert bool(narrow) == (dialect != "onnx.attention_23")


def _num_keys(call: Call) -> int:
    return int(call["K"].shape[2] + (call["past_key"].shape[2] if "past_key" in call else 0))


BOTH = {"past_key": torch.zeros(1, 1, 2, 8), "past_value": torch.zeros(1, 1, 2, 8)}


@pytest.mark.parametrize(
    ("dialect", "change", "wrong"),
    [
        ("onnx.attention", {}, None),
        ("onnx.attention", {**BOTH, "nonpad_kv_seqlen": torch.tensor([2])}, "nonpad_kv_seqlen"),
        ("onnx.attention", {"attn_mask": torch.zeros(2, 2)}, None),
        ("onnx.attention_23", {"attn_mask": torch.zeros(2, 2)}, "attn_mask"),
        ("onnx.attention", {"attn_mask": torch.zeros(2, 4)}, "attn_mask"),
        (
            "onnx.attention",
            {"attn_mask": torch.zeros(2, 2), "nonpad_kv_seqlen": torch.tensor([3])},
            "attn_mask",
        ),
        ("onnx.attention", {"attn_mask": torch.zeros(3, 3, dtype=torch.bool)}, "attn_mask"),
        ("onnx.attention", {"attn_mask": torch.zeros(2, 1, 1, 3, dtype=torch.bool)}, "attn_mask"),
        ("onnx.attention", {"attn_mask": torch.zeros(1, 3, dtype=torch.int64)}, None),
        ("onnx.attention_23", {"nonpad_kv_seqlen": torch.tensor([2])}, "nonpad_kv_seqlen"),
        ("onnx.attention", {"left_window_size": 1}, "left_window_size"),
        ("onnx.attention_25", {"left_window_size": 1, "right_window_size": 0}, None),
        ("onnx.attention_25", {"left_window_size": -2}, "left_window_size"),
    ],
)
def test_what_is_legal_of_attention(dialect: str, change: Call, wrong: str | None) -> None:
    call = {"Q": torch.zeros(1, 1, 2, 8), "K": torch.zeros(1, 1, 3, 8), "V": torch.zeros(1, 1, 3, 8)}
    assert [name for name, _ in problems(OPERATORS[dialect], {**call, **change})] == [wrong] * (
        wrong is not None
    )


@pytest.mark.parametrize(
    ("count", "seqlens", "total", "wrong"),
    [
        (3, [2, 0], 3, None),  # a first prompt, padded on the right
        (3, [1, 0], 3, None),
        (3, [1, 0], 2, "total_sequence_length"),
        (3, [4, 4], 5, "seqlens_k"),  # a later part of two rows
        (3, [4], 5, None),
        (1, [4, 0], 5, None),
        (1, [4, 0], 1, "total_sequence_length"),  # would be a first prompt, and write slot 0
        (9, [8], 9, "total_sequence_length"),
    ],
)
def test_what_is_legal_of_group_query_attention(
    count: int, seqlens: list[int], total: int, wrong: str | None
) -> None:
    new, past = torch.zeros(len(seqlens), count, 16), torch.zeros(len(seqlens), 1, 8, 16)
    call = {
        "query": new, "key": new, "value": new, "past_key": past, "past_value": past,
        "seqlens_k": torch.tensor(seqlens, dtype=torch.int32),
        "total_sequence_length": torch.tensor(total, dtype=torch.int32), "num_heads": 1, "kv_num_heads": 1,
    }  # fmt: skip
    found = problems(OPERATORS["microsoft.group_query_attention"], call)
    assert bool(found) == (wrong is not None)


@pytest.mark.parametrize(
    ("kind", "shape", "is_legal"),
    [
        ("PER_TENSOR", [1], True),
        ("PER_TENSOR", [1, 1, 1, 1], True),
        ("PER_TENSOR", [1, 2, 1, 16], False),
        ("PER_CHANNEL", [1, 2, 1, 16], True),
        ("PER_CHANNEL", [2, 1, 16], True),
        ("PER_CHANNEL", [1, 2, 1, 1], False),
        ("PER_CHANNEL", [1], False),
        ("PER_CHANNEL", [1, 2, 16, 1], False),
    ],
)
def test_scales_broadcast_to_the_cache(kind: str, shape: list[int], is_legal: bool) -> None:
    operator = OPERATORS["microsoft.group_query_attention"]
    new, past = torch.ones(1, 1, 32), torch.zeros(1, 2, 8, 16, dtype=torch.int8)
    scale = torch.full(shape, 0.5)
    call = {
        "query": new, "key": new, "value": new, "past_key": past, "past_value": past,
        "seqlens_k": torch.tensor([3], dtype=torch.int32), "kv_cache_bit_width": 8,
        "total_sequence_length": torch.tensor(4, dtype=torch.int32), "num_heads": 2, "kv_num_heads": 2,
        "k_scale": scale, "v_scale": scale, "k_quant_type": kind, "v_quant_type": kind,
    }  # fmt: skip
    assert bool(problems(operator, call)) != is_legal
    if is_legal:
        assert bool((operator.oracle(call)["present_key"][:, :, 3] == 2).all())


def test_only_those_with_the_values_of_attributes_are_left() -> None:
    dialect = "pmx.key_value_cache"
    every = [*read(published(), dialect)]
    some = vectors.having(every, dialect, "cache_layout=0,quant_bit=8")
    calls = [OPERATORS[dialect].complete(x.call) for x in every]
    expected = [
        x for x, call in zip(every, calls, strict=True) if (call["cache_layout"], call["quant_bit"]) == (0, 8)
    ]
    assert some == expected and 0 < len(some) < len(every)
    with pytest.raises(
        ArgumentError, match=r"^--only must be NAME=VALUE of the attributes .*, got 'layout=0'"
    ):
        vectors.having(every, dialect, "layout=0")
    with pytest.raises(
        ArgumentError, match=r"^--only must leave vectors, got 'cache_layout=77', which none of"
    ):
        vectors.having(every, dialect, "cache_layout=77")


def test_known_mistakes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "mistakes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}: {text}" for name, text in sorted({x.name: x.text for x in MISTAKES}.items())]


def test_of_several_mistakes_the_nearest_is_named_and_simple_calls_come_first() -> None:
    """A third of the vectors fails by a known mistake, and the others by none; a few are skipped."""
    dialect = "vllm.reshape_and_cache_flash"
    legal = [x for x in read(published(), dialect) if x.expected is not None]

    def target(operator: Operator, vector: Vector, call: Call) -> Results:
        number = legal.index(vector)
        if number % 10 == 9:
            raise Unsupported("no kernel of this dtype" if number % 20 == 9 else "no such layout")
        if number % 3 == 0:
            call["key"], call["value"] = call["value"], call["key"]
        else:
            call["key"] = call["key"] + 100  # which is no known mistake
        return operator.oracle(call)

    report = run(target, legal)
    assert report.cause is None and report.nearest is not None
    assert 0 < 2 * report.nearest_explained <= len(report.failures)
    assert without_cause(report).startswith(
        f"no single known mistake explains more than half of {len(report.failures)} failures; nearest, "
        f"{report.nearest_explained} of"
    )
    assert sum(report.reasons.values()) == report.count("skipped") and [*report.reasons.values()] == sorted(
        report.reasons.values(), reverse=True
    )
    sizes = [
        sum(x.numel() for x in named(o.vector.call).values() if isinstance(x, Tensor))
        for o in report.failures
    ]
    assert sizes == sorted(sizes)
