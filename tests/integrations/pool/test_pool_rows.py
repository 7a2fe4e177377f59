"""Rows of different lengths in a pool: each has the bits that it has alone, whatever others are beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from integrations.pool.test_pool_windows import FAMILIES, cold, model_of, text
from oracles.pairs import in_turn, pairwise
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig

from kvloom.caches import Sequences
from kvloom.errors import ArgumentError, KVError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, enable
from kvloom.store import KVStore

NAMES, ALL_KINDS = ["Llama", "Mistral", "Gemma3"], ["auto", "int8", "int4:g8"]
IN_TURN = pytest.mark.parametrize(("name", "kv"), in_turn(NAMES, ALL_KINDS))


def padded(texts: Sequence[Tensor], more: int = 0) -> tuple[Tensor, Tensor]:
    """Texts ``[1, N]`` as a batch, padded on the left with tokens of another text; and the mask."""
    width = max(x.shape[1] for x in texts) + more
    ids = torch.cat([torch.cat([text(width, 7)[:, : width - x.shape[1]], x], 1) for x in texts])
    mask = torch.cat([torch.arange(width)[None] >= width - x.shape[1] for x in texts])
    return ids, mask.long()


@torch.no_grad()
def forward(model: Any, cache: Any, ids: Tensor, mask: Tensor, cuts: Sequence[int] = ()) -> Tensor:
    """Logits of the columns that a cache lacks, in pieces that end in ``cuts`` and at the end."""
    position, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for end in (*cuts, ids.shape[1]):
        start = cache.get_seq_length()
        found.append(
            model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=position[:, start:end],
                past_key_values=cache,
            ).logits
        )
    return torch.cat(found, 1)


def expect_rows(model: Any, kv: str, texts: Sequence[Tensor], logits: Tensor) -> None:
    """The last logits of each row have the bits that they have cold, in a row alone without padding."""
    for row, own in zip(texts, logits, strict=True):
        count = min(row.shape[1], own.shape[0])
        assert torch.equal(own[-count:], cold(model, kv, row)[0, -count:])


@pytest.mark.parametrize(("name", "kv", "page_size"), pairwise(NAMES, ALL_KINDS, [4, 16]))
def test_random_batches_have_the_bits_of_their_rows(name: str, kv: str, page_size: int) -> None:
    model, draw = model_of(name), random.Random(page_size)
    pool = KVPool.for_model(model, kv, page_size, max_tokens=draw.choice([1200, 2400]))
    known, num_found = [text(200)], 0
    for seed in range(8):
        texts = []
        for i in range(draw.randrange(1, 5)):
            row = draw.choice(known)[:, : draw.randrange(1, 201)]
            if draw.random() < 0.6:
                row = torch.cat([row, text(draw.randrange(1, 90), 10 * seed + i)], 1)
            texts.append(row)
        ids, mask = padded(texts, draw.choice([0, 0, 3]))
        cache = pool.begin(ids, attention_mask=mask)
        start, width = cache.get_seq_length(), ids.shape[1]
        num_found += sum(max(start - width + x.shape[1], 0) for x in texts)
        cuts = sorted(draw.sample(range(start + 1, width), min(draw.randrange(3), width - start - 1)))
        expect_rows(model, kv, texts, forward(model, cache, ids, mask, cuts))
        pool.commit(cache, ids)
        pool.check()
        known += texts
    assert num_found > 300
    assert pool.report()["tokens_found"] == num_found


@IN_TURN
def test_a_short_row_begins_far_behind_a_long_one(name: str, kv: str) -> None:
    """Cold and warm: attention counts its tokens from its own first one, whole partial results later."""
    model, texts = model_of(name, 600), [text(1100), text(70, 1), text(500, 2), text(1, 3)]
    pool = KVPool.for_model(model, kv, 16, max_tokens=8000)
    ids, mask = padded(texts)
    for cuts in ((), (200, 590, 1000, 1098)):
        cache = pool.begin(ids, attention_mask=mask)
        assert cache.get_seq_length() == 0
        expect_rows(model, kv, texts, forward(model, cache, ids, mask, cuts))
    pool.commit(cache, ids)
    warm = pool.begin(ids, attention_mask=mask)
    assert warm.get_seq_length() == 1088  # of the others 58 tokens, 488, and none
    expect_rows(model, kv, texts, forward(model, warm, ids, mask))
    pool.check()


@pytest.mark.parametrize(("kv", "name"), in_turn(ALL_KINDS, ["Mistral", "Gemma3"]))
def test_windows_give_back_what_they_pass_of_each_row(
    name: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without spare pages, and where new tokens alone fill a window, in rows that begin among them."""
    monkeypatch.setattr(Sequences, "_can_keep", lambda *args: False)
    model, texts = model_of(name), [text(700), text(200, 1), text(20, 2), text(600, 3)]
    pool = KVPool.for_model(model, kv, 8, max_tokens=4000)
    ids, mask = padded(texts, 2)
    for cuts in ((), (30, 530, 600, 690), (101, 102, 650, 690, 695, 700)):
        cache = pool.begin(ids, attention_mask=mask)
        expect_rows(model, kv, texts, forward(model, cache, ids, mask, cuts))
        if name == "Mistral":
            assert pool.report()["active"] <= 4 * (40 + 32 + 16) // 8
    pool.check()


@torch.no_grad()
def generated(model: Any, cache: Any, ids: Tensor, mask: Tensor, new: int = 6) -> Tensor:
    out: Tensor = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )
    return out


@pytest.mark.parametrize(("name", "kv", "attention"), pairwise(NAMES, ALL_KINDS, ["kvloom", "sdpa", "eager"]))
def test_generate_continues_each_row_as_alone_in_turns(name: str, kv: str, attention: str) -> None:
    """Questions of other lengths, of which rows find other parts, behind answers of the turn before."""
    model = model_of(name)
    model.set_attn_implementation(attention)
    if "int4" in kv and attention != "kvloom":
        kv += ",recent=0"  # of which a pool promises nothing with gathered tokens
    pool, texts = KVPool.for_model(model, kv, 8, max_tokens=2400), [text(90), text(23, 1), text(7, 2)]
    for turn in range(3):
        ids, mask = padded(texts)
        cache = pool.begin(ids, attention_mask=mask)
        start = cache.get_seq_length()
        assert (start > 60) == (turn > 0)
        out = generated(model, cache, ids, mask)
        for row, x in zip(texts, out, strict=True):
            alone = generated(model, KVCache.for_model(model, kv), row, torch.ones_like(row))
            assert torch.equal(x[ids.shape[1] :], alone[0, row.shape[1] :])
        pool.commit(cache, out)
        pool.check()
        texts = [
            torch.cat([row, x[None, ids.shape[1] :], text(5 + 3 * turn + i, turn)], 1)
            for i, (row, x) in enumerate(zip(texts, out, strict=True))
        ]


@IN_TURN
def test_what_a_batch_committed_is_found_alone_and_in_others(name: str, kv: str) -> None:
    """Pages begin where the tokens of a row do, so another padding changes nothing."""
    model, texts = model_of(name), [text(75), text(160, 1), text(5, 2)]
    pool = KVPool.for_model(model, kv, 8, max_tokens=2400)
    ids, mask = padded(texts, 1)
    cache = pool.begin(ids, attention_mask=mask)
    expect_rows(model, kv, texts, forward(model, cache, ids, mask))
    pool.commit(cache, ids)
    for row, found in zip(texts, (72, 152, 0), strict=True):
        alone = pool.begin(row)
        assert alone.get_seq_length() == found
        expect_rows(model, kv, [row], forward(model, alone, row, torch.ones_like(row)))
    others = [torch.cat([texts[1], text(30, 3)], 1), texts[0], text(2, 4)]
    ids, mask = padded(others)
    cache = pool.begin(ids, attention_mask=mask)
    assert cache.get_seq_length() == 160  # of the others 45 tokens, and none
    assert pool.report()["tokens_found"] == 72 + 152 + 160 + 45
    expect_rows(model, kv, others, forward(model, cache, ids, mask))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_windows(name: str) -> None:
    """Chunks, sinks and soft caps count from the first token of a row, too."""
    model, texts = family(name, "kvloom"), [text(60), text(9, 1), text(37, 2)]
    enable(model, batch_invariant=True)
    pool, (ids, mask) = KVPool.for_model(model, page_size=4, max_tokens=800), padded(texts, 1)
    for cuts in ((), (20, 55, 60)):
        for start in (1, 57):
            cache = pool.begin(ids, attention_mask=mask, salt=str(cuts))
            assert cache.get_seq_length() == start
            own = [end for end in cuts if end > start]
            expect_rows(model, "auto", texts, forward(model, cache, ids, mask, own))
            pool.commit(cache, ids)


def test_the_row_with_the_most_to_compute_decides_for_all() -> None:
    model, known = model_of("Llama"), text(80)
    pool = KVPool.for_model(model, page_size=8, max_tokens=800)
    expect_rows(model, "auto", [known], _committed(model, pool, known))
    texts = [torch.cat([known, text(4, 1)], 1), text(20, 2), torch.cat([known[:, :40], text(9, 3)], 1)]
    ids, mask = padded(texts)
    cache = pool.begin(ids, attention_mask=mask)
    assert cache.get_seq_length() == 84 - 20
    assert cache.begins == [0, 64, 35]
    expect_rows(model, "auto", texts, forward(model, cache, ids, mask))


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_a_prefix_is_cut_where_its_window_is_there(name: str) -> None:
    """Of each text a window and the rollback behind it are left: 71 tokens, and what their first page has."""
    model, known = model_of(name), [text(160), text(80, 1)]
    pool, found = KVPool.for_model(model, page_size=8, max_tokens=1600), []
    for ids in known:
        _committed(model, pool, ids)
    for group in pool._prefixes.groups:
        if group.window is not None:
            group.tree.evict(group.pages.pool.num_passed)
    for more in ((35, 1), (34, 1), (2, 2), (1, 34), (1, 35)):
        texts = [torch.cat([x, text(n, 2)], 1) for x, n in zip(known, more, strict=True)]
        ids, mask = padded(texts)
        cache = pool.begin(ids, attention_mask=mask)
        found.append(cache.get_seq_length())
        expect_rows(model, "auto", texts, forward(model, cache, ids, mask))
    assert found == [0, 160, 160, 127, 0]


def _committed(model: Any, pool: KVPool, ids: Tensor) -> Tensor:
    cache, mask = pool.begin(ids), torch.ones_like(ids)
    logits = forward(model, cache, ids, mask)
    pool.commit(cache, ids)
    return logits


@IN_TURN
def test_another_process_reads_rows_from_a_store(name: str, kv: str, tmp_path: Path) -> None:
    model, texts = model_of(name), [text(75), text(160, 1), text(30, 2)]
    ids, mask = padded(texts)
    for found in (0, 152):
        with KVStore(f"file://{tmp_path}", read="always") as store:
            pool = KVPool.for_model(model, kv, 8, max_tokens=1600, store=store)
            cache = pool.begin(ids, attention_mask=mask)
            assert cache.get_seq_length() == found
            expect_rows(model, kv, texts, forward(model, cache, ids, mask))
            pool.commit(cache, ids)
            pool.check()


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], r"\[1, 1, 1, 0\] in row 0: pad on the left"),
        ([[1, 1, 1, 1], [0, 1, 0, 1]], r"\[0, 1, 0, 1\] in row 1"),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], r"\[0, 0, 0, 0\] in row 0"),
        ([[0, 0, 2, 1], [1, 1, 1, 1]], r"\[0, 0, 2, 1\] in row 0"),
    ],
)
def test_a_mask_of_other_padding_is_refused(mask: list[list[int]], got: str) -> None:
    pool = KVPool.for_model(model_of("Llama"), page_size=8, max_tokens=80)
    with pytest.raises(ArgumentError, match=rf"^attention_mask must be 0 in front of .*, got {got}"):
        pool.begin(text(4).repeat(2, 1), attention_mask=torch.tensor(mask))
    assert pool.report()["tokens_asked"] == 0


@pytest.mark.parametrize("mask", [torch.ones(2, 3).long(), torch.ones(2, 4), torch.ones(4).long()])
def test_a_mask_of_other_sizes_is_refused(mask: Tensor) -> None:
    pool = KVPool.for_model(model_of("Llama"), page_size=8, max_tokens=80)
    with pytest.raises(KVError, match="attention_mask must be"):
        pool.begin(text(4).repeat(2, 1), attention_mask=mask)


def test_a_forward_is_given_the_padding_of_its_cache() -> None:
    """Other masks and positions compute other keys, which would be found under the tokens alone."""
    model, (ids, mask) = model_of("Llama"), padded([text(9), text(6, 1)])
    position = (mask.cumsum(1) - 1).clamp(min=1)
    pool = KVPool.for_model(model, page_size=4, max_tokens=80)
    more, less = mask.clone(), mask.clone()
    more[1, 3] = less[1, 2] = 1
    more[1, 3] = 0
    bad: list[dict[str, Any]] = [
        {"position_ids": position},
        {"position_ids": position, "attention_mask": torch.ones_like(mask)},
        {"position_ids": position, "attention_mask": more},
        {"position_ids": position, "attention_mask": less},
        {"position_ids": position, "attention_mask": mask[:, 1:]},
        {"attention_mask": mask},
        {"attention_mask": mask, "position_ids": torch.arange(9)[None]},
        {"attention_mask": mask, "position_ids": position + mask},
    ]
    for inputs in bad:
        cache = pool.begin(ids, attention_mask=mask)
        name = "position_ids" if inputs.get("attention_mask") is mask else "attention_mask"
        with pytest.raises(ArgumentError, match=rf"^{name} must .*\[0, 3\]"), torch.no_grad():
            model(ids, past_key_values=cache, **inputs)
        assert cache.get_seq_length() == 0
        expect_rows(model, "auto", [ids[:1], ids[1:, 3:]], forward(model, cache, ids, mask))


def test_a_model_without_positions_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4))
    pool, (ids, mask) = KVPool.for_model(model, page_size=4, max_tokens=80), padded([text(9), text(6, 1)])
    with pytest.raises(
        UnsupportedError, match="model must take position_ids for rows with padding, got Bloom"
    ):
        pool.begin(ids, attention_mask=mask)
    assert pool.begin(ids, attention_mask=torch.ones_like(mask)).get_seq_length() == 0


@IN_TURN
def test_forks_and_chosen_rows_go_on(name: str, kv: str, tmp_path: Path) -> None:
    """Also while a row has not begun: it begins where its tokens do in each of them."""
    model, texts = model_of(name), [text(90), text(6, 1), text(60, 2)]
    pool = KVPool.for_model(model, kv, 8, max_tokens=2400)
    ids, mask = padded(texts)
    cache = pool.begin(ids, attention_mask=mask)
    forward(model, cache, ids[:, :50], mask[:, :50])
    fork, chosen, repeated = cache.fork(), cache.fork(), cache.fork()
    chosen.batch_select_indices(torch.tensor([2, 1]))
    repeated.batch_repeat_interleave(2)
    torch.save(cache, tmp_path / "cache")
    loaded = torch.load(tmp_path / "cache", weights_only=False)
    rows = {
        cache: [0, 1, 2],
        fork: [0, 1, 2],
        chosen: [2, 1],
        repeated: [0, 0, 1, 1, 2, 2],
        loaded: [0, 1, 2],
    }
    for own, order in rows.items():
        assert own.begins == [[0, 84, 30][i] for i in order]
        logits = forward(model, own, ids[order], mask[order], (70, 86))
        expect_rows(model, kv, [texts[i] for i in order], logits)
        if own is not loaded:
            pool.commit(own, ids[order])
    pool.check()


@IN_TURN
def test_a_crop_keeps_the_padding(name: str, kv: str) -> None:
    """Also back to where a row has not begun."""
    model, texts = model_of(name), [text(60), text(9, 1), text(40, 2)]
    pool = KVPool.for_model(model, kv, 8, max_tokens=2400)
    ids, mask = padded(texts, 2)
    cache = pool.begin(ids, attention_mask=mask)
    forward(model, cache, ids, mask)
    for count in (3, 9, 14):
        cache.crop(-count)
        assert (cache.get_seq_length(), cache.begins) == (62 - count, [2, 53, 22])
        expect_rows(model, kv, texts, forward(model, cache, ids, mask))
    pool.commit(cache, ids)
    pool.check()
    assert pool.begin(texts[2]).get_seq_length() == 32


def test_rows_are_cropped_apart_once_all_have_begun() -> None:
    model, texts = model_of("Mistral"), [text(60), text(9, 1)]
    pool, (ids, mask) = KVPool.for_model(model, page_size=8, max_tokens=800), padded(texts)
    cache = pool.begin(ids, attention_mask=mask)
    forward(model, cache, ids[:, :50], mask[:, :50])
    before = cache.layers[0].keys
    assert not before[1].any()  # and nothing of others, whose pages stand there
    with pytest.raises(StateError, match="counts must be one number for all while sequence 1 has not begun"):
        cache.crop([-3, 0])
    assert torch.equal(cache.layers[0].keys, before) and cache.get_seq_length() == 50
    forward(model, cache, ids, mask)
    cache.crop([-3, 0])
    assert (cache.get_seq_length(), cache.begins) == (57, [0, 48])
    texts = [torch.cat([x, text(4, 5)], 1) for x in (texts[0][:, :57], texts[1])]
    ids, mask = padded(texts)
    expect_rows(model, "auto", texts, forward(model, cache, ids, mask))
    with pytest.raises(ArgumentError, match="whole sequences of one length, or rows padded as"):
        pool.commit(cache, ids)
