"""Keys and values of a text go from a store to a file and back, and continue the text as they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from carry.models import HAS_ROPE_PARAMETERS, small, text
from oracles.language_models import make_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import KVPool
from kvloom.integrations.transformers.exchange import exchange

PAGE = 4
TOKENS = torch.randint(0, 60, (1, 14), generator=torch.Generator().manual_seed(0))
IDS = TOKENS[0].tolist()
FULL = 12  # tokens in full pages


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("sdpa")


@pytest.fixture(scope="module")
def pairs(model: Any) -> dict[str, torch.Tensor]:
    """What transformers' own cache has of the text."""
    cache = DynamicCache()
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
    named = {"input_ids": TOKENS}
    for i, (key, value) in enumerate((x.keys, x.values) for x in cache.layers):
        named |= {f"past_key_values.{i}.key": key, f"past_key_values.{i}.value": value}
    return named


def test_a_file_goes_into_a_store_and_out_again(
    model: Any, pairs: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    store, source, target = (str(tmp_path / x) for x in ("store", "in.safetensors", "out.safetensors"))
    save_file(pairs, source)
    assert exchange(source, store, model, [*IDS, 1, 2], page_size=PAGE, salt="x") == FULL
    assert exchange(store, target, model, IDS, page_size=PAGE, salt="x") == FULL
    again = load_file(target)
    assert again.keys() == pairs.keys()
    assert torch.equal(again["input_ids"], TOKENS[:, :FULL])
    for name in again.keys() - {"input_ids"}:
        assert torch.equal(again[name], pairs[name][:, :, :FULL])
    assert not list(tmp_path.glob(".*"))  # no temporary file


def test_a_pool_finds_the_codes_that_it_would_have_made(
    model: Any, pairs: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    source, url = str(tmp_path / "in.safetensors"), f"file://{tmp_path}/store"
    save_file(pairs, source)
    assert exchange(source, url, model, IDS, "int8:g16", PAGE) == FULL
    kept = KVPool.for_model(model, "int8:g16", PAGE, max_tokens=64)
    cache = kept.begin(TOKENS)
    for i in range(len(cache.layers)):
        cache.update(pairs[f"past_key_values.{i}.key"], pairs[f"past_key_values.{i}.value"], i)
    expected = cache.to_legacy_cache()
    with KVPool.for_model(model, "int8:g16", PAGE, max_tokens=64, store=url) as pool:
        found = pool.begin(TOKENS).to_legacy_cache()
    for mine, theirs in zip(found, expected, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert torch.equal(x, y[:, :, :FULL])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": TOKENS + 1}, "SOURCE must have the input_ids of the text"),
        ({"more": torch.ones(1)}, "SOURCE must have past_key_values.0.key to "),
        ({"past_key_values.0.key": torch.ones(1, 2, 14, 3)}, r"SOURCE must have past_key_values.0.key \[1, "),
        ({"past_key_values.0.key": torch.ones(1, 14, 3)}, r"past_key_values\[0\] must be a key and a value"),
    ],
)
def test_a_file_of_something_else_is_refused(
    change: dict[str, torch.Tensor],
    message: str,
    model: Any,
    pairs: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    source, store = tmp_path / "in.safetensors", tmp_path / "store"
    save_file(pairs | change, source)
    with pytest.raises(ArgumentError, match=message):
        exchange(str(source), str(store), model, IDS, page_size=PAGE)
    assert not store.exists()


def test_what_cannot_be_read_or_written_is_named(
    model: Any, pairs: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    source = str(tmp_path / "in.safetensors")
    store = str(tmp_path / "store")
    with pytest.raises(ArgumentError, match="SOURCE or TARGET must be a file"):
        exchange(store, store, model, IDS)
    with pytest.raises(ArgumentError, match="SOURCE must be a safetensors file"):
        exchange(source, store, model, IDS)
    save_file(pairs, source)
    with pytest.raises(ArgumentError, match="SOURCE must have 1 to 3 tokens"):
        exchange(source, store, model, IDS[:3])
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="TARGET must be a store that can be written"):
        exchange(source, str(tmp_path / "file"), model, IDS, page_size=PAGE)
    with pytest.raises(ArgumentError, match="store must be a folder that is there"):
        exchange(store, str(tmp_path / "out.safetensors"), model, IDS)
    (tmp_path / "store").mkdir()
    with pytest.raises(ArgumentError, match="SOURCE must have the first page of the text"):
        exchange(store, str(tmp_path / "out.safetensors"), model, IDS, page_size=PAGE)
    exchange(source, store, model, IDS, page_size=PAGE)
    with pytest.raises(ArgumentError, match="TARGET must be a file that can be written"):
        exchange(store, str(tmp_path / "none" / "out.safetensors"), model, IDS, page_size=PAGE)


@pytest.mark.skipif(not HAS_ROPE_PARAMETERS, reason="transformers 5 has rope_parameters")
def test_a_file_of_a_long_text_is_not_found_for_a_short_one(tmp_path: Path) -> None:
    """Each length beyond the trained one has its own frequencies with dynamic RoPE, so keys of its own."""
    model, cache, tokens = small("dynamic"), DynamicCache(), text(40)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    named = {"input_ids": tokens}
    for i, (key, value) in enumerate((x.keys, x.values) for x in cache.layers):
        named |= {f"past_key_values.{i}.key": key, f"past_key_values.{i}.value": value}
    save_file(named, tmp_path / "in.safetensors")
    store = str(tmp_path / "store")
    with pytest.raises(ArgumentError, match="TARGET must be a store that can be written"):
        exchange(str(tmp_path / "in.safetensors"), store, model, tokens[0].tolist(), page_size=PAGE)
    with KVPool.for_model(model, "auto", PAGE, max_tokens=40, store=f"file://{store}") as pool:
        assert pool.begin(tokens[:, :20]).get_seq_length() == 0
