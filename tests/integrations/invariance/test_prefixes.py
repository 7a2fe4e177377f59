"""What follows a prefix that is found has the bits of what follows one that is computed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.invariance.test_families import model_of
from torch import Tensor

from kvloom.integrations.transformers import KVPool, disable, enable
from kvloom.store import KVStore

KINDS = ["auto", "int8", "int4,recent=0"]
PROMPT = torch.randint(3, 99, (1, 90), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def asked(model: Any, pool: KVPool, ids: Tensor, cuts: int, found: int) -> Tensor:
    """Logits of a text behind what the pool finds, ``found`` tokens, in random cuts; it is committed."""
    cache, draw, parts = pool.begin(ids), random.Random(cuts), []
    at = cache.get_seq_length()
    assert at == found
    while at < ids.shape[1]:
        size = draw.choice([1, 2, 3, 7, 30])
        parts.append(model(ids[:, at : at + size], past_key_values=cache).logits)
        at += size
    pool.commit(cache, ids)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("name", ["Llama", "Qwen2-MoE"])
def test_a_prefix_that_is_found_changes_no_bit(
    name: str, kv: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = model_of(name, dtype)
    enable(model, batch_invariant=True)
    options: dict[str, Any] = {"kv": kv, "page_size": 4, "max_tokens": 400, "batch_invariant": True}
    with KVStore(f"file://{tmp_path}") as store:
        pool = KVPool.for_model(model, **options, store=store)
        cold = asked(model, pool, PROMPT, 0, 0)
        for cuts, length in ((1, 90), (2, 61), (3, 33)):
            found = (length - 1) // 4 * 4
            assert torch.equal(asked(model, pool, PROMPT[:, :length], cuts, found), cold[:, found:length])
    # As another process finds it.
    with KVStore(f"file://{tmp_path}", read="always") as store:
        pool = KVPool.for_model(model, **options, store=store)
        assert torch.equal(asked(model, pool, PROMPT, 4, 88), cold[:, 88:])


@pytest.mark.parametrize(
    ("kv", "page_size"),
    [
        ("int4", 4),
        ("int4", 24),
        ("int4", 128),
        ("int4,recent=16", 16),
        ("int4,recent=1", 16),
        ("int8,recent=40", 16),
    ],
)
def test_a_text_goes_on_behind_its_residual_window(kv: str, page_size: int) -> None:
    """Turns of a conversation: each begins with all of the last one, which was committed."""
    model = model_of("Llama", torch.float32)
    enable(model, batch_invariant=True)
    ids = torch.randint(3, 99, (1, 700), generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {"kv": kv, "page_size": page_size, "max_tokens": 40_000}
    cold = asked(model, KVPool.for_model(model, **options), ids, 0, 0)
    pool = KVPool.for_model(model, **options)
    for cuts, length, before in ((1, 150, 0), (2, 151, 150), (3, 301, 151), (4, 560, 301), (5, 700, 560)):
        found = before // page_size * page_size
        assert torch.equal(asked(model, pool, ids[:, :length], cuts, found), cold[:, found:length])
    assert pool.report()["residual_bytes"] > 0


@torch.no_grad()
@pytest.mark.parametrize("kv", ["int4", "int8,recent=40"])
def test_texts_that_part_from_a_known_one_within_it(kv: str) -> None:
    """They find what is still unquantized there, and what they parted at is kept for the next ones."""
    model = model_of("Llama", torch.float32)
    enable(model, batch_invariant=True)
    ids = torch.randint(3, 99, (6, 300), generator=torch.Generator().manual_seed(6))
    ids[1:, :200] = ids[0, :200]
    cold = asked(model, KVPool.for_model(model, kv, 8, max_tokens=40_000), ids, 0, 0)
    pool = KVPool.for_model(model, kv, 8, max_tokens=6_400)
    residual, found = pool._prefixes.groups[1].tree, []
    for row in range(6):
        found.append(pool.begin(ids[row : row + 1]).get_seq_length())
        assert torch.equal(
            asked(model, pool, ids[row : row + 1], row, found[-1]), cold[row : row + 1, found[-1] :]
        )
        residual.evict(residual._pool.num_passed)  # what windows left behind goes first
        pool.check()
    assert found == [0, 0, 200, 200, 200, 200]


@torch.no_grad()
def test_tokens_that_read_codes_are_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    """After a removal of more than a residual window keeps."""
    model = model_of("Llama", torch.float32)
    ids = torch.randint(3, 99, (1, 300), generator=torch.Generator().manual_seed(6))
    for kept, found in ((290, 296), (100, 0)):
        pool = KVPool.for_model(model, "int4", 8, max_tokens=6_400)
        cache = pool.begin(ids)
        model(ids, past_key_values=cache)
        for sequences in cache.sequences:
            sequences.give_up_passed()  # as where others need the room
        cache.crop(kept - 300)
        model(ids[:, kept:], past_key_values=cache)
        pool.commit(cache, ids)
        assert pool.begin(ids).get_seq_length() == found
    assert "tokens read codes where a residual window" in caplog.text


@pytest.mark.parametrize("kv", ["int4", "int4,recent=16", "int8,recent=40"])
def test_a_text_goes_on_behind_its_residual_window_in_another_process(kv: str, tmp_path: Path) -> None:
    """Pools that never saw the text, one with pages of another size, read it from the store."""
    model = model_of("Llama", torch.float32)
    enable(model, batch_invariant=True)
    ids = torch.randint(3, 99, (1, 300), generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {"kv": kv, "max_tokens": 40_000}
    cold = asked(model, KVPool.for_model(model, **options), ids, 0, 0)
    for cuts, length, found, size in ((1, 40, 0, 16), (2, 150, 32, 16), (3, 300, 144, 8), (4, 300, 296, 8)):
        with KVStore(f"file://{tmp_path}", read="always") as store:
            pool = KVPool.for_model(model, **options, page_size=size, store=store)
            assert torch.equal(asked(model, pool, ids[:, :length], cuts, found), cold[:, found:length])
            assert (
                pool.begin(ids[:, : length + 1]).get_seq_length() == (length - (length == 300)) // size * size
            )


@torch.no_grad()
def test_a_prefix_of_damaged_residual_tokens_is_not_found(tmp_path: Path) -> None:
    model = model_of("Llama", torch.float32)
    enable(model)
    options: dict[str, Any] = {"kv": "int4", "page_size": 8, "max_tokens": 40_000}
    with KVStore(f"file://{tmp_path}", read="always") as store:
        asked(model, KVPool.for_model(model, **options, store=store), PROMPT, 1, 0)
    runs = sorted(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    assert len(runs) == 2
    data = bytearray(runs[1].read_bytes())  # unquantized, the larger one
    data[-9] ^= 1
    runs[1].write_bytes(data)
    with KVStore(f"file://{tmp_path}", read="always") as store:
        pool = KVPool.for_model(model, **options, store=store)
        assert asked(model, pool, PROMPT, 1, 0).shape[1] == 90
        assert sum(tier.counts["damaged"] for tier in store.tiers) == 1


@torch.no_grad()
def test_rows_go_on_behind_their_residual_windows() -> None:
    """Rows that ended in texts of different lengths."""
    model = model_of("Llama", torch.float32)
    enable(model, batch_invariant=True)
    ids = torch.randint(3, 99, (2, 200), generator=torch.Generator().manual_seed(6))
    pools = [KVPool.for_model(model, "int4", 8, max_tokens=40_000) for _ in range(2)]
    cold = asked(model, pools[0], ids, 0, 0)
    asked(model, pools[1], ids[:1, :101], 1, 0)
    asked(model, pools[1], ids[1:, :96], 2, 0)
    assert torch.equal(asked(model, pools[1], ids[:, :160], 3, 96), cold[:, 96:160])
    assert torch.equal(asked(model, pools[1], ids, 4, 160), cold[:, 160:])
    assert torch.equal(asked(model, pools[1], ids[:1, :130], 5, 128), cold[:1, 128:130])


def test_residual_windows_take_as_many_pages_as_they_were_given() -> None:
    model = model_of("Llama", torch.float32)
    enable(model)
    pool, texts = KVPool.for_model(model, "int4", 8, max_tokens=6_400), list[Tensor]()
    for seed in range(12):
        texts.append(torch.randint(3, 99, (1, 90), generator=torch.Generator().manual_seed(seed)))
        asked(model, pool, texts[-1], 1, 0)
    found = [pool.begin(ids).get_seq_length() for ids in texts]
    assert found[-4:] == [88] * 4 and found[0] == 0  # the ends that were used last
    [residual] = [sequences for sequences in pool._empty.sequences if not sequences.is_required]
    assert residual.pages.pool.num_pages == 8 * 11  # eight ends of 64 and 16 tokens
    assert pool.report()["residual_bytes"] == 88 * 8 * residual.pages.storages[0].nbytes_per_token * 2


def test_pages_of_layers_that_were_not_invariant_are_not_found(tmp_path: Path) -> None:
    model = model_of("Llama", torch.float32)
    enable(model)
    for batch_invariant, found in ((False, 0), (True, 0), (True, 88)):
        with KVStore(f"file://{tmp_path}", read="always") as store:
            pool = KVPool.for_model(
                model, page_size=4, max_tokens=400, store=store, batch_invariant=batch_invariant
            )
            asked(model, pool, PROMPT, 1, found)
            pool.close()


def test_pages_of_attention_that_was_not_invariant_are_not_found(tmp_path: Path) -> None:
    """By default layers in bfloat16 are batch invariant, and a model has its own attention."""
    model = model_of("Llama", torch.bfloat16)
    cold = asked(model, KVPool.for_model(model, max_tokens=400, batch_invariant=True), PROMPT, 0, 0)
    with KVStore(f"file://{tmp_path}", read="always") as store:
        options: dict[str, Any] = {"page_size": 4, "max_tokens": 400, "store": store}
        with KVPool.for_model(model, **options) as pool:
            asked(model, pool, PROMPT, 1, 0)
            asked(model, pool, PROMPT, 1, 88)
            enable(model, batch_invariant=True)
            assert torch.equal(asked(model, pool, PROMPT, 2, 0), cold)
            assert torch.equal(asked(model, pool, PROMPT, 3, 88), cold[:, 88:])
            disable(model)
            assert pool.begin(PROMPT).get_seq_length() == 88  # its own from before
        store.flush()
        for length in (90, 61):
            found = (length - 1) // 4 * 4
            with KVPool.for_model(model, **options, batch_invariant=True) as pool:
                assert torch.equal(asked(model, pool, PROMPT[:, :length], 4, found), cold[:, found:length])


def test_the_report_of_a_pool_says_what_its_layers_are() -> None:
    model = model_of("Llama", torch.bfloat16)
    pool = KVPool.for_model(model, max_tokens=64)
    layers = pool.report()["layers"]
    assert json.loads(json.dumps(layers)) == layers  # as metrics are sent
    assert sum(layers["rules"].values()) == 15 and layers["packed"] == layers["packed_bytes"] == 0
    assert layers["not_invariant"] == {"attention is 'sdpa', not 'kvloom'": 1}
    assert layers["batch_invariant"] is False
    with KVPool.for_model(model, max_tokens=64, batch_invariant=True):
        assert pool.report()["layers"]["batch_invariant"] is True  # it attends in place until it is closed
    assert pool.report()["layers"] == layers
