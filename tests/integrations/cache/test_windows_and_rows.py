"""Sliding windows give their pages back, and rows can be cropped apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.models.test_families import FAMILIES, STOCK, continued, family, padded_prompts
from oracles.language_models import FakeQuantCache, FakeQuantCache4, make_model, make_prompts
from oracles.pairs import pairwise
from torch import Tensor
from transformers import DynamicCache

from kvloom.caches.rows.sequences import ROLLBACK
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, enable

WINDOWED = [name for name, (*_, windows) in FAMILIES.items() if windows]
ATTENTIONS = pytest.mark.parametrize("attention", ["sdpa", "kvloom"])


class FakeQuant8(FakeQuantCache):
    group = 8


class FakeQuant4(FakeQuantCache4):
    group = 8


FAKE: dict[str, type[FakeQuantCache]] = {"int8:g8": FakeQuant8, "int4:g8,rotate=none,recent=0": FakeQuant4}


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, tokens: Tensor, cache: Any, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, past_key_values=cache, use_cache=True, **inputs).logits


# --- windows ------------------------------------------------------------------------------------------------


@ATTENTIONS
@pytest.mark.parametrize("name", WINDOWED)
def test_a_long_text_gives_the_stock_logits(name: str, attention: str) -> None:
    """Windows of 8 tokens over hundreds, in steps of every size."""
    model, tokens = family(name, STOCK.get(name)), text(2, 260)
    steps = [150, 1, 3, 1, 60, 1, 1, 42, 1]
    expected, cache = [], DynamicCache(config=model.config)
    for part in tokens.split(steps, dim=1):
        expected.append(logits_of(model, part, cache))
    if attention == "kvloom":
        model.set_attn_implementation("kvloom")
    ours = KVCache.for_model(model, page_size=4)
    for part, want in zip(tokens.split(steps, dim=1), expected, strict=True):
        torch.testing.assert_close(logits_of(model, part, ours), want, rtol=1e-3, atol=1e-3)
    for sequences in ours.sequences:
        assert sequences.num_positions == 260
        assert sequences.window is None or sequences.num_pages_held <= 2 * (-(-(8 + ROLLBACK) // 4) + 2)


@pytest.mark.parametrize(
    ("name", "kv", "attention"),
    pairwise(["Mistral", "Gemma2", "gpt-oss", "Llama4"], list(FAKE), ["sdpa", "kvloom"]),
)
def test_quantized_windows_give_the_tokens_of_quantized_values(name: str, kv: str, attention: str) -> None:
    model, stock = family(name), FAKE[kv]
    expected = continued(model, stock(config=model.config), num_beams=3)
    if attention == "kvloom":
        model.set_attn_implementation("kvloom")
    actual = continued(model, KVCache.for_model(model, kv=kv, page_size=4), num_beams=3)
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize(
    ("name", "options", "attention"),
    pairwise(
        ["Mistral", "Gemma2", "Llama4"],
        [{"prompt_lookup_num_tokens": 3}, {"assistant_model": True}],
        ["sdpa", "kvloom"],
    ),
    ids=str,
)
def test_drafts_are_rejected_behind_a_window(name: str, options: dict[str, Any], attention: str) -> None:
    model = family(name)
    tokens = text(1, 12).repeat(1, 2)
    options = {"do_sample": False, "max_new_tokens": 30} | options
    if "assistant_model" in options:
        options["assistant_model"] = family("Llama")
    expected = model.generate(tokens, do_sample=False, max_new_tokens=30)
    if attention == "kvloom":
        model.set_attn_implementation("kvloom")
    ours = KVCache.for_model(model, page_size=4)
    assert torch.equal(model.generate(tokens, past_key_values=ours, **options), expected)


@pytest.mark.parametrize("name", WINDOWED)
def test_memory_of_windows_stays_small_at_a_long_prompt(name: str) -> None:
    model = family(name, "kvloom")
    cache = KVCache.for_model(model, page_size=4)
    logits_of(model, text(1, 400), cache)
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            assert layer.pages.nbytes <= 60 * layer.pages.nbytes_per_token


def test_a_crop_behind_the_window_is_refused_before_anything_changes() -> None:
    model = family("Gemma2")
    cache = KVCache.for_model(model, page_size=4)
    logits_of(model, text(1, 100), cache)
    fork = cache.fork()
    with pytest.raises(StateError, match="sequence 0 must keep at least"):
        cache.crop(-90)
    assert cache.get_seq_length() == 100
    assert torch.equal(logits_of(model, text(1, 3), cache), logits_of(model, text(1, 3), fork))


def test_a_crop_that_one_layer_refuses_changes_no_other() -> None:
    """The layers without a window come first, and could go back."""
    model = family("Gemma2")
    model.config.layer_types = ["full_attention", "sliding_attention"] * 2
    cache = KVCache.for_model(model, page_size=4)
    for layer_idx in range(4):
        cache.update(torch.ones(1, 2, 100, 8), torch.ones(1, 2, 100, 8), layer_idx)
    assert [sequences.window for sequences in cache.sequences] == [None, 8]
    with pytest.raises(StateError, match="sequence 0 must keep at least"):
        cache.crop(-90)
    assert [sequences.num_positions for sequences in cache.sequences] == [100, 100]


def test_a_step_that_broke_off_can_be_taken_back() -> None:
    """Layers that never saw its tokens keep their own number."""
    model = make_model()
    cache, whole = (KVCache.for_model(model, page_size=4) for _ in range(2))
    for c in (cache, whole):
        logits_of(model, text(1, 20), c)
    cache.update(torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 16), 0)
    cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [23, 20, 20]
    cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20, 20]
    assert torch.equal(logits_of(model, text(1, 3), cache), logits_of(model, text(1, 3), whole))


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_cropped_apart_continue_as_if_alone() -> None:
    """One step of speculation: each row keeps another number of its draft, and is checked by itself."""
    check_rows(make_model(), make_model("kvloom"), kv="auto")


@pytest.mark.parametrize(
    "kv", ["int8:g8", "int4:g8,recent=0", "int4:g8,rotate=both,recent=0", "int2:g8,recent=0"]
)
def test_quantized_rows_cropped_apart_continue_as_if_alone(kv: str) -> None:
    check_rows(make_model(), make_model("kvloom"), kv=kv)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "gpt-oss"])
def test_rows_of_windows_cropped_apart_continue_as_if_alone(name: str) -> None:
    check_rows(family(name), family(name, "kvloom"), kv="auto", vocabulary=99)


def check_rows(gathering: Any, in_place: Any, kv: str, vocabulary: int = 199) -> None:
    rng = torch.Generator().manual_seed(5)
    tokens, tail = (torch.randint(3, vocabulary, (3, n), generator=rng) for n in (23, 4))
    removed = [4, 0, 9]
    kept = [23 - n for n in removed]
    mask = torch.zeros(3, 23 + 4, dtype=torch.int64)
    for row, length in enumerate(kept):
        mask[row, 23 - length :] = 1
    position = (mask.cumsum(1) - 1).clamp(min=0)[:, -4:]
    for model, inputs in (
        (gathering, {"attention_mask": mask, "position_ids": position}),
        (in_place, {"attention_mask": mask, "position_ids": position}),
        (in_place, {"position_ids": position}),  # columns that hold nothing need no mask there
    ):
        cache = KVCache.for_model(model, kv=kv, page_size=4)
        logits_of(model, tokens, cache)
        cache.crop([-n for n in removed])
        assert cache.get_seq_length() == 23
        together = logits_of(model, tail, cache, **inputs)
        for row, length in enumerate(kept):
            alone = KVCache.for_model(model, kv=kv, page_size=4)
            logits_of(model, tokens[row : row + 1, :length], alone)
            expected = logits_of(model, tail[row : row + 1], alone)
            torch.testing.assert_close(together[row : row + 1], expected, rtol=1e-3, atol=1e-3)


def test_rows_that_all_lose_tokens_move_to_the_front() -> None:
    model = make_model()
    cache = KVCache.for_model(model, page_size=4)
    logits_of(model, text(2, 20), cache)
    keys = cache.layers[1].keys
    cache.crop(torch.tensor([-3, -7]))
    assert cache.get_seq_length() == 17
    assert torch.equal(cache.layers[1].keys[0], keys[0, :, :17])
    assert torch.equal(cache.layers[1].keys[1, :, 4:], keys[1, :, :13])
    cache.crop([-17, -13])
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("rows", [[0], [2, 0], [1], [0, 0]], ids=str)
def test_the_length_stays_when_rows_are_selected(rows: list[int]) -> None:
    """So that a mask keeps its width, also where the longest row is not among them."""
    model, tail = make_model("kvloom"), text(3, 4, seed=1)
    tokens, kept = text(3, 23), [19, 23, 14]
    cache = KVCache.for_model(model, page_size=4)
    logits_of(model, tokens, cache)
    cache.crop([n - 23 for n in kept])
    cache.batch_select_indices(torch.tensor(rows))
    assert cache.get_seq_length() == 23 and cache.get_mask_sizes(1, 0) == (24, 0)
    position = torch.stack([torch.arange(kept[row], kept[row] + 4) for row in rows])
    mask = torch.stack([torch.arange(27) >= 23 - kept[row] for row in rows]).long()
    together = logits_of(model, tail[rows], cache, position_ids=position, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = KVCache.for_model(model, page_size=4)
        logits_of(model, tokens[row : row + 1, : kept[row]], alone)
        expected = logits_of(model, tail[row : row + 1], alone)
        torch.testing.assert_close(together[i : i + 1], expected, rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == 27


BAD_COUNTS = [
    [-1],
    [-1, -1, -1],
    [1, 0],
    [0, 2],
    [-1.0, -1],
    [-1, "a"],
    [-1, True],
    -1.5,
    None,
    "ab",
    torch.zeros(2),
]


@pytest.mark.parametrize("counts", BAD_COUNTS, ids=str)
def test_bad_counts_of_rows_are_refused(counts: Any) -> None:
    model = make_model()
    cache = KVCache.for_model(model)
    logits_of(model, text(2, 9), cache)
    with pytest.raises(ArgumentError, match="tokens_to_remove must be one number of at most 0 for each of 2"):
        cache.crop(counts)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("counts", [-2, [-1, 0]], ids=str)
@pytest.mark.parametrize("name", [name for name in ("Qwen3-Next", "Falcon-H1") if name in FAMILIES])
def test_a_recurrent_state_cannot_go_back(name: str, counts: Any) -> None:
    model = family(name)
    cache = KVCache.for_model(model)
    logits_of(model, padded_prompts()["input_ids"], cache)
    with pytest.raises(UnsupportedError, match=r"cannot go back|cannot be cropped row by row"):
        cache.crop(counts)
    assert cache.get_seq_length() == 14
    assert [sequences.num_positions for sequences in cache.sequences] == [14]


def test_padded_prompts_can_be_cropped_apart() -> None:
    model, inputs = make_model("kvloom"), make_prompts([9, 14])
    tokens = inputs["input_ids"]
    cache = KVCache.for_model(model, page_size=4)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits_of(model, inputs.pop("input_ids"), cache, **inputs)
    cache.crop([-2, 0])
    mask = torch.zeros(2, 15, dtype=torch.int64)
    mask[0, 7:], mask[1] = 1, 1
    position = (mask.cumsum(1) - 1)[:, -1:]
    together = logits_of(model, torch.tensor([[5], [6]]), cache, attention_mask=mask, position_ids=position)
    alone = KVCache.for_model(model)
    logits_of(model, tokens[:1, 5:12], alone)
    expected = logits_of(model, torch.tensor([[5]]), alone)
    torch.testing.assert_close(together[:1], expected, rtol=1e-3, atol=1e-3)


def test_a_model_with_windows_has_the_same_bits_in_pages_of_any_size() -> None:
    tokens, found = text(1, 300), []
    for page_size in (4, 16, 32, 128):
        model = family("Mistral", "kvloom")
        enable(model, page_size=page_size, batch_invariant=True)
        pieces = tokens.split([100, *[1] * 40, 40, 120] if page_size != 32 else [300], 1)
        cache = KVCache.for_model(model, page_size=page_size)
        found.append(torch.cat([logits_of(model, piece, cache) for piece in pieces], 1))
    assert all(torch.equal(other, found[0]) for other in found[1:])
