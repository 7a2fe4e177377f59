"""What is planned is what is allocated, to the byte."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import FAMILIES, family
from integrations.models.test_vision_models import FAMILIES as VISION
from integrations.models.test_vision_models import vision_model

import kvloom
from kvloom.caches.tensors.storage import Storage
from kvloom.cli import main
from kvloom.core.arguments import parse_bytes
from kvloom.core.spelling import PACKS
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, enable, load_model, report_layers
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.models import bundled_model_path
from kvloom.planning.model import ModelShape
from kvloom.planning.plan import Plan, kinds_for

NEEDS_STATES = pytest.mark.skipif(
    StatefulLayer is type(None), reason="this transformers has no recurrent states in its caches"
)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def filled(model: Any, cache: Any, rows: int, length: int) -> Any:
    model(torch.ones(rows, length, dtype=torch.int64), past_key_values=cache, use_cache=True)
    return cache


def table_nbytes(cache: KVCache) -> int:
    """Bytes of the tables that attention reads, one for each window."""
    first: dict[Any, Storage] = {}
    for layer in cache._own_layers:
        first.setdefault(layer.pages.sequences, layer.pages.storage)
    return sum(x.pages.table(x.tables, storage).nbytes for x, storage in first.items())


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_plan_is_what_a_cache_allocates(name: str) -> None:
    model = family(name)
    shape = ModelShape.of(model.config)
    assert shape.weights == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    for kv in [*kinds_for(shape), "int4:g2"]:
        for length in (1, 16, 90) if kv == "auto" else (47,):  # within the windows, and beyond
            planned = kvloom.plan(shape, kv, context=length, batch=2, page_size=4, at_once=True)
            cache = filled(model, KVCache.for_model(model, kv=kv, page_size=4), 2, length)
            assert planned.cache + planned.scales == cache.nbytes
            assert planned.tables == table_nbytes(cache)


def test_a_model_whose_configuration_is_planned_attends_as_before() -> None:
    model = family("gpt-oss", "kvloom")
    before = copy.deepcopy(vars(model.config))
    kvloom.plan(model.config, context=9)
    assert vars(model.config) == before


@pytest.mark.parametrize("values", [None, "int4:g4,recent=0", "int2:g4,recent=0"])
@pytest.mark.parametrize("kv", ["auto", "float16", "int8:g8"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_codes_scales_and_waste_are_those_of_the_tensors(kv: str, values: str | None, page_size: int) -> None:
    model = family("Llama")
    cache = filled(model, KVCache.for_model(model, kv=kv, values=values, page_size=page_size), 3, 10)
    planned = kvloom.plan(model.config, kv, values=values, context=10, batch=3, page_size=page_size)
    for layer, own in zip(planned.layers, cache.layers, strict=True):
        key, value, *scales = own.pages.storage.tensors
        assert layer.cache == key.nbytes + value.nbytes
        assert layer.scales == sum(x.nbytes for x in scales if x is not None)
        assert layer.waste == layer.total * (-10 % page_size) // (10 + -10 % page_size)
    assert planned.total == sum((planned.weights, planned.cache, planned.scales, planned.tables))


@pytest.mark.parametrize(("batch", "max_tokens"), [(2, 2 * 20), (1, 18)])
def test_a_plan_is_what_a_pool_allocates(batch: int, max_tokens: int) -> None:
    model = family("DeepSeek-V3")
    pool = KVPool.for_model(model, kv="int8:g8", page_size=4, max_tokens=max_tokens)
    cache = filled(model, pool.begin(torch.ones(batch, 18, dtype=torch.int64)), batch, 18)
    planned = kvloom.plan(model.config, "int8:g8", context=18, batch=batch, page_size=4)
    assert planned.cache + planned.scales == cache.nbytes
    assert planned.by_kind().keys() == {"latent"}


@pytest.mark.parametrize("name", [x for x in ("Qwen3-Next", "Falcon-H1") if x in FAMILIES])
def test_recurrent_states_are_counted(name: str) -> None:
    model = family(name)
    cache = filled(model, KVCache.for_model(model), 3, 7)
    states = [
        x
        for layer in cache.layers
        for kept in ("conv_states", "recurrent_states")
        for x in getattr(layer, kept, {}).values()
    ]
    assert kvloom.plan(model.config, context=7, batch=3).states == sum(x.nbytes for x in states) > 0


@pytest.mark.skipif("Falcon-H1" not in FAMILIES, reason="this transformers has no Falcon-H1")
def test_what_texts_with_states_take_in_a_pool_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = family("Falcon-H1")
    model.config.save_pretrained(tmp_path)
    options = ["--kv", "int8:g8", "--context", "100", "--batch", "7", "--page-size", "16"]
    assert main(["plan", "--model", str(tmp_path), *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    pool = KVPool.for_model(model, "int8:g8", max_tokens=7 * 112)
    cache = filled(model, pool.begin(torch.ones(7, 100, dtype=torch.int64)), 7, 100)
    nbytes = pool.report()["states"]["nbytes"]
    tokens = -(-nbytes // int(cache.nbytes_per_token))
    assert f"in {nbytes:,} bytes of its max_state_bytes, as many as {tokens:,} tokens take;" in shown
    said = f"7 texts take {7 * nbytes:,} bytes of states and {cache.nbytes:,} bytes of pages for 700 tokens"
    assert said in shown


@pytest.mark.parametrize("name", VISION)
def test_a_model_that_sees_is_planned_with_its_tower(name: str) -> None:
    model = vision_model(name)
    cache = filled(model, KVCache.for_model(model, kv="int8:g8", page_size=4), 2, 20)
    planned = kvloom.plan(model.config, "int8:g8", context=20, batch=2, page_size=4, at_once=True)
    assert planned.weights == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    assert planned.cache + planned.scales == cache.nbytes > 0
    assert kvloom.plan(model.config).context == model.config.get_text_config().max_position_embeddings


@NEEDS_STATES
@pytest.mark.parametrize("name", ["Mamba", "FalconMamba"])
def test_states_of_a_model_without_attention_are_counted(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, hidden_size=32, vocab_size=99)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    cache = transformers.DynamicCache(config=config)
    model(torch.ones(3, 7, dtype=torch.int64), use_cache=True, **as_argument(model, cache))
    states = sum(
        x.nbytes
        for layer in cache.layers
        for kept in (layer.conv_states, layer.recurrent_states)
        for x in kept.values()
    )
    planned = kvloom.plan(config, context=7, batch=3)
    assert planned.states == states > 0 == planned.cache
    assert planned.by_kind().keys() == {"recurrent"}
    with pytest.raises(ArgumentError, match=r"^context must be given if the configuration .*, got None"):
        kvloom.plan(config)


@NEEDS_STATES
def test_states_outside_the_cache_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=99,
        lru_width=32,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="recurrent states in its cache, got RecurrentGemmaConfig"):
        kvloom.plan(config, context=9)
    config.save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--context", "9"]) == 2
    assert capsys.readouterr().err.startswith(
        "kvloom: --model must be of a model that keeps recurrent states"
    )


@pytest.mark.parametrize("name", [*FAMILIES, *VISION])
def test_packed_weights_are_what_enable_packs(name: str) -> None:
    model = family(name) if name in FAMILIES else vision_model(name)
    shape = ModelShape.of(model.config)
    enable(model, pack=True)
    planned = kvloom.plan(shape, context=9, pack=True)
    packed = [x.weight for x in model.modules() if hasattr(x, "packed")]
    assert sum(x.nbytes for x in packed) < report_layers(model).packed_bytes <= planned.packed
    assert planned.packed == sum(x.element_size() * prod(-(-n // 64) * 64 for n in x.shape) for x in packed)
    without = kvloom.plan(shape, context=9)
    assert planned.total == without.total + planned.packed and without.packed == 0
    assert kvloom.plan(shape, context=9, pack="only").total == without.total
    with pytest.raises(ArgumentError, match="pack must be False, True or 'only', got 'both'"):
        kvloom.plan(shape, context=9, pack="both")


def test_packed_weights_of_whole_blocks_are_planned_to_the_byte() -> None:
    model, _ = load_model(bundled_model_path(), progress=False)
    model.config.dtype = torch.float32
    enable(model.float(), pack=True)
    planned = kvloom.plan(model.config, context=9, pack=True)
    assert planned.packed == report_layers(model).packed_bytes > 0
    assert planned.longest_context(planned.total) == 16  # of the page that 9 tokens are in
    assert planned.longest_context(planned.total - planned.packed) == 0


def test_kinds_of_layers() -> None:
    kinds = {
        name: {
            kind: count for kind, (count, _) in kvloom.plan(family(name).config, context=9).by_kind().items()
        }
        for name in ("Llama", "Gemma2", "DeepSeek-V3")
    }
    assert kinds == {"Llama": {"full": 2}, "Gemma2": {"window": 2, "full": 2}, "DeepSeek-V3": {"latent": 2}}


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_the_inverse_is_the_last_that_fits(name: str) -> None:
    shape = ModelShape.of(family(name).config)

    def total(context: int, batch: int) -> int:
        return kvloom.plan(shape, "int8:g8", context=context, batch=batch, page_size=4).total

    memory = total(300, 5)
    planned = kvloom.plan(shape, "int8:g8", context=200, batch=3, page_size=4)
    longest, largest = planned.longest_context(memory), planned.largest_batch(memory)
    assert longest is not None and largest is not None
    assert all(total(n, 3) <= memory for n in range(longest + 1))
    assert max(total(n, 3) for n in range(longest + 1, longest + 5)) > memory
    assert total(200, largest) <= memory < total(200, largest + 1)


def test_too_little_memory_holds_nothing() -> None:
    planned = kvloom.plan(family("Llama").config, context=9)
    assert (planned.longest_context(planned.weights - 1), planned.largest_batch(planned.weights - 1)) == (
        0,
        0,
    )


def test_windows_alone_have_any_length() -> None:
    planned = kvloom.plan(family("Mistral").config, context=9)
    assert planned.longest_context(planned.weights + (1 << 20)) is None


def test_the_bundled_model_from_its_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((bundled_model_path() / "config.json").read_bytes())
    model, _ = load_model(bundled_model_path(), progress=False)
    for path in (str(tmp_path), tmp_path / "config.json"):
        planned = kvloom.plan(path, "int8")
        assert planned.weights == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
        assert planned.context == model.config.max_position_embeddings


def test_nothing_is_allocated_for_a_large_model() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, dtype="bfloat16",
    )  # fmt: skip
    planned = kvloom.plan(config, "int8", context=131_072)
    assert planned.weights - 141_107_412_992 in (256, 512)  # frequencies, which transformers 5 has twice
    assert planned.cache == 80 * 2 * 8 * 128 * 131_072


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context": -1}, "context must be an int of at least 0, got -1"),
        ({"batch": 0}, "batch must be an int of at least 1, got 0"),
        ({"page_size": True}, "page_size must be an int of at least 1, got True"),
        ({"kv": "int8:g3"}, "kv must have a group that divides the head dim 8, got 'int8:g3'"),
        ({"kv": "int3"}, "kv must be one of"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{sentence}"):
        kvloom.plan(family("Llama").config, **{"context": 9} | options)


def test_a_group_that_latent_vectors_do_not_have_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^kv must (fit every|have a group).*got 'int8:g16'"):
        kvloom.plan(family("DeepSeek-V3").config, "int8:g16", context=9)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^config must be a PretrainedConfig or a path, got 3"):
        kvloom.plan(3)
    with pytest.raises(
        ArgumentError, match=r"^model must be a config.json or a GGUF file, or a local folder with one"
    ):
        kvloom.plan(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ArgumentError, match=r"^model must have a configuration that transformers loads"):
        kvloom.plan(tmp_path)


def test_models_that_cannot_be_planned_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"^config must be of a causal language model .* ViTConfig"):
        kvloom.plan(transformers.ViTConfig(), context=9)
    config = family("Llama").config
    config.quantization_config = {"quant_method": "unheard-of"}
    with pytest.raises(
        UnsupportedError, match=r"^config must have weights .*, got quant_method 'unheard-of': give"
    ):
        kvloom.plan(config)


def test_the_decoder_of_an_encoder_decoder_is_planned_alone() -> None:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, decoder_attention_heads=4, vocab_size=99,
        is_encoder_decoder=False, is_decoder=True,
    )  # fmt: skip
    model = transformers.BartForCausalLM(config)
    planned = kvloom.plan(config, context=20, batch=2)
    assert planned.weights == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    cache = filled(model.eval(), KVCache.for_model(model), 2, 20)
    assert planned.cache == cache.nbytes


# --- the command --------------------------------------------------------------------------------------------

COMMAND = ["plan", "--model", str(bundled_model_path()), "--context", "100"]


def test_the_command_prints_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--memory", "1GB"]) == 0
    shown, planned = capsys.readouterr().out, kvloom.plan(bundled_model_path(), "int8", context=100)
    for number in (planned.weights, planned.cache, planned.total, planned.longest_context(10**9)):
        assert f" {number:,} " in shown
    assert all(
        kind in shown for kind in ("auto", "float32", "float16", "bfloat16", "int8", "int4", "int2", "full")
    )


def test_the_command_writes_json_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--kv",
        "int4:g32",
        "--batch",
        "7",
        "--memory",
        "1.5GiB",
        "--json",
        "--plot",
        str(tmp_path / "plan.svg"),
    ]
    assert main([*COMMAND, *options]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    planned: Plan = kvloom.plan(bundled_model_path(), "int4:g32", context=100, batch=7)
    assert {name: shown[name] for name in ("total", "waste", "tables")} == {
        "total": planned.total,
        "waste": planned.waste,
        "tables": planned.tables,
    }
    assert shown["largest_batch"] == planned.largest_batch(3 << 29)
    assert sum(layer["cache"] for layer in shown["layers"]) == planned.cache
    titles = [
        x.text for x in ElementTree.parse(tmp_path / "plan.svg").iter("{http://www.w3.org/2000/svg}title")
    ]
    assert f"weights: {planned.weights:,} bytes" in titles


@pytest.mark.parametrize("pack", ["no", "both", "only"])
def test_the_command_counts_packed_weights(
    pack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        *COMMAND,
        "--kv",
        "int8",
        "--memory",
        "1GB",
        "--plot",
        str(tmp_path / "plan.svg"),
        "--pack",
        pack,
    ]
    planned = kvloom.plan(bundled_model_path(), "int8", context=100, pack=PACKS[pack])
    without = kvloom.plan(bundled_model_path(), "int8", context=100)
    assert (planned.packed > 0) == (pack == "both") and planned.total == without.total + planned.packed
    assert main([*asked, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["packed"], found["total"]) == (planned.packed, planned.total)
    assert found["largest_batch"] == planned.largest_batch(10**9)
    assert f"packed: {planned.packed:,} bytes" in (tmp_path / "plan.svg").read_text()
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert f" {planned.total:,} " in shown and (" packed " in shown) == (pack == "both")
    assert (f" {planned.packed:,} " in shown) or pack != "both"


def test_the_command_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--page-size", "0"]) == 2
    assert "kvloom: --page-size must be an int of at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("24GB", 24 * 10**9), ("24 GiB", 24 << 30), ("0.5MiB", 1 << 19), ("77", 77)]
)
def test_bytes_are_spelled_as_usual(text: str, nbytes: int) -> None:
    assert parse_bytes("--memory", text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1gb", "1e9", "nan"])
def test_other_spellings_of_bytes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, f"--memory={text}"]) == 2
    assert "--memory must be a number of bytes such as 24GB or 24GiB" in capsys.readouterr().err
