"""A pool with a store: a prefix read back is the prefix computed, bit for bit, or it is not read."""

from __future__ import annotations

import errno
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.pool.test_pool import generate, text
from oracles.language_models import make_model
from oracles.pairs import in_turn
from torch import Tensor

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.integrations.transformers.pool.identity import fingerprint_of
from kvloom.store import KVStore, read_head

PAGE = 4
KINDS = ["auto", "int8:g16", "int4:g16,recent=0", "int4:g16,rotate=both,recent=0", "int2:g16,recent=0"]


def opened(url: str, **options: Any) -> KVStore:
    return KVStore(url, read="always", **options)


def make_pool(model: Any, store: Any, kv: str = "auto", page_size: int = PAGE, **options: Any) -> KVPool:
    options = {"max_tokens": 400} | options
    return KVPool.for_model(model, kv=kv, page_size=page_size, store=store, **options)


def commit(model: Any, pool: KVPool, tokens: Tensor, salt: str = "") -> None:
    """Compute all tokens at once and wait until they are stored."""
    cache = pool.begin(tokens, salt)
    with torch.no_grad():
        model(tokens[:, int(cache.get_seq_length()) :], past_key_values=cache)
    pool.commit(cache, tokens, salt)
    assert pool.flush()
    pool.check()


def finish(model: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    """Logits of the tokens that a cache lacks."""
    with torch.no_grad():
        return model(tokens[:, int(cache.get_seq_length()) :], past_key_values=cache).logits


def found(model: Any, url: str, tokens: Tensor, salt: str = "", **options: Any) -> int:
    """How many tokens a new pool begins with."""
    with opened(url) as store:
        return int(make_pool(model, store, **options).begin(tokens, salt).get_seq_length())


@pytest.mark.parametrize(("kv", "attention"), in_turn(KINDS, ["sdpa", "kvloom"]))
def test_cold_is_warm(kv: str, attention: str, tmp_path: Path) -> None:
    """Computed, in memory, and from a store under other page sizes and layouts; each length."""
    model, url = make_model(attention), f"file://{tmp_path}"
    cases = []
    with opened(url) as store:
        pool = make_pool(model, store, kv)
        for length in range(2 * PAGE + 2):
            prefix, rest = text(length, seed=1), text(5, seed=length)
            tokens = torch.cat([prefix, rest], dim=1)
            if length:
                commit(model, pool, prefix, str(length))
            warm = pool.begin(tokens, str(length))
            num_found = int(warm.get_seq_length())
            assert num_found == length // PAGE * PAGE
            computed = KVCache.for_model(model, kv=kv, page_size=PAGE)
            if length:
                finish(model, computed, prefix)
            if length > num_found:  # crop(0) keeps all in some versions of transformers, and none in others
                computed.crop(num_found - length)
            expected = finish(model, computed, tokens)
            assert torch.equal(finish(model, warm, tokens), expected)
            cases.append((str(length), tokens, num_found, expected))
    for page_size, layout in ((PAGE, "auto"), (PAGE, "NHD"), (2, "HND"), (1, "auto"), (8, "rows")):
        with opened(url) as store:
            pool = make_pool(model, store, kv, page_size, layout=layout)
            for salt, tokens, num_found, expected in cases:
                cache = pool.begin(tokens, salt)
                again = int(cache.get_seq_length())
                assert again == num_found // page_size * page_size
                if again == num_found:
                    assert torch.equal(finish(model, cache, tokens), expected)
                pool.check()


def test_generate_continues_what_another_process_computed(tmp_path: Path) -> None:
    model, url, system = make_model(), f"file://{tmp_path}", text(22)
    for seed, expected in ((1, 0), (2, 20), (3, 20), (1, 28)):
        tokens = torch.cat([system, text(8, seed)], dim=1)
        with make_pool(model, opened(url)) as pool:
            cache = pool.begin(tokens)
            assert cache.get_seq_length() == expected
            output = generate(model, tokens, cache)
            pool.commit(cache, output)
        assert torch.equal(output, generate(model, tokens, None))


def test_a_text_that_leaves_a_run_in_its_middle_has_the_pages_before(tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    with opened(url) as store:
        commit(model, make_pool(model, store), text(40))
    for same in (0, 3, 4, 17, 39):
        tokens = text(40).clone()
        tokens[0, same] = 3 if tokens[0, same] != 3 else 4
        assert found(model, url, tokens) == same // PAGE * PAGE


def test_a_longer_text_is_stored_behind_the_shorter_and_nothing_twice(tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    for length, count in ((8, 1), (20, 2), (21, 2), (40, 3)):
        for page_size in (PAGE, 2):
            with opened(url) as store:
                commit(model, make_pool(model, store, page_size=page_size), text(length))
        assert len(list(tmp_path.rglob("*.safetensors"))) == count
    assert found(model, url, text(40)) == 36


def test_salts_do_not_share(tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    with opened(url) as store:
        commit(model, make_pool(model, store), text(20), "a")
    assert [found(model, url, text(20), salt) for salt in ("", "b", "a")] == [0, 0, 16]


def test_rows_are_found_and_stored_each(tmp_path: Path) -> None:
    model, url, rows = make_model(), f"file://{tmp_path}", text(18, rows=3)
    with opened(url) as store:
        commit(model, make_pool(model, store), rows)
    assert [found(model, url, row[None]) for row in rows] == [16, 16, 16]
    assert found(model, url, rows) == 16


def change_weight(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight.data[0, 0] += 1e-3


def change_rope(model: Any) -> None:
    if hasattr(model.config, "rope_parameters"):
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5000.0}
    else:  # transformers 4
        model.config.rope_theta = 5000.0


def change_config(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


@pytest.mark.parametrize("change", [change_weight, change_rope, change_config, lambda x: x.bfloat16()])
def test_another_model_finds_nothing(change: Any, tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    with opened(url) as store:
        commit(model, make_pool(model, store), text(20))
    assert found(model, url, text(20)) == 16
    change(model)
    assert found(model, url, text(20)) == 0


def test_another_format_finds_nothing(tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    with opened(url) as store:
        commit(model, make_pool(model, store, "int8:g16"), text(20))
    assert found(model, url, text(20), kv="int8:g16") == 16
    for kv in (
        "auto",
        "int8:g8",
        "int4:g16,recent=0",
        "bfloat16",
        "int8:g16,rotate=keys",
        "int8:g16,rotate=values",
        "int2:g16,recent=0",
    ):
        assert found(model, url, text(20), kv=kv) == 0


@pytest.mark.parametrize("values", [None, "int8:g16"])
def test_symmetric_codes_are_found_as_such_alone(values: str | None, tmp_path: Path) -> None:
    """Files of before there were ranges say nothing of them, and neither do these."""
    model, url = make_model(), f"file://{tmp_path}"
    symmetric, full = "int4:g16,recent=0,range=symmetric", "int4:g16,recent=0"
    with opened(url) as store:
        commit(model, make_pool(model, store, symmetric, values=values), text(20))
    assert "full_range" not in fingerprint_of(model, symmetric, values).to_json()
    assert found(model, url, text(20), kv=symmetric, values=values) == 16
    assert found(model, url, text(20), kv=full, values=values) == 0
    with opened(url) as store:
        commit(model, make_pool(model, store, full, values=values), text(20))
    assert found(model, url, text(20), kv=full, values=values) == 16
    assert found(model, url, text(20), kv=symmetric, values=values) == 16


def damage_the_run(folder: Path) -> None:
    """Change the first byte of the pages of the one run in a folder."""
    (path,) = folder.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    run, _ = read_head(bytes(data), len(data))
    data[-run.data_bytes] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_is_not_used_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    with opened(url) as store:
        commit(model, make_pool(model, store), text(20))
    damage_the_run(tmp_path)
    with opened(url) as store:
        pool = make_pool(model, store)
        assert pool.begin(text(20)).get_seq_length() == 0
        assert pool.report()["store"]["stores"][url]["damaged"] == 1
        assert pool.begin(text(20)).get_seq_length() == 0
        assert [x.levelname for x in caplog.records] == ["WARNING"]
        assert "does not have its checksum" in caplog.text
        commit(model, pool, text(20))
    assert [x.parent.name for x in tmp_path.rglob("*")].count("quarantine") == 1
    assert found(model, url, text(20)) == 16


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "s3://none/x", "file:///proc/none"])
def test_a_store_that_is_away_is_one_warning(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"redis": "redis", "s3": "obstore"}.get(url.partition(":")[0], "xxhash"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    model = make_model()
    with opened(url) as store:
        pool = make_pool(model, store)
        for _ in range(2):
            commit(model, pool, text(20))
        assert pool.begin(text(20)).get_seq_length() == 16
        counts = store.report()["stores"][url]
    assert counts["read_errors"] == 1
    assert {x.levelname for x in caplog.records if x.name == "kvloom.store"} == {"WARNING"}
    assert sum("cannot be read" in x.getMessage() for x in caplog.records) == 1


def test_a_full_disk_leaves_nothing_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, url = make_model(), f"file://{tmp_path}"

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(url) as store:
        pool = make_pool(model, store)
        monkeypatch.setattr(os, "write", full)
        commit(model, pool, text(20))
        monkeypatch.undo()
        assert store.report()["stores"][url]["write_errors"] == 1
    assert {x.name for x in tmp_path.rglob("*") if x.is_file()} == {"probe"}
    assert [x.levelno for x in caplog.records] == [logging.WARNING]


def test_reading_that_takes_longer_than_computing_is_left(tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    with KVStore(url) as store:
        pool = make_pool(model, store)
        commit(model, pool, text(20))
        for _ in range(9):
            store.tiers[0].speed.note(60.0, 0)
        assert make_pool(model, store).begin(text(20)).get_seq_length() == 0
        assert store.report()["tokens_not_worth_reading"] == 16
        for _ in range(9):
            store.tiers[0].speed.note(1e-6, 0)
        assert make_pool(model, store).begin(text(20)).get_seq_length() == 16
        assert pool.report()["store"]["seconds_per_token"] > 0


def test_a_local_store_in_front_takes_what_the_remote_one_has(tmp_path: Path) -> None:
    model, near, far = make_model(), f"file://{tmp_path}/near", f"file://{tmp_path}/far"
    with opened(far) as store:
        commit(model, make_pool(model, store), text(20))
    with KVStore(near, far, read="always") as store:
        assert make_pool(model, store).begin(text(20)).get_seq_length() == 16
        store.flush()
    assert found(model, near, text(20)) == 16
    with KVStore(near, far, read="always") as store:
        commit(model, make_pool(model, store), text(41))
    assert [found(model, url, text(41)) for url in (near, far)] == [40, 40]


def test_a_small_pool_reads_what_it_has_room_for(tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    with opened(url) as store:
        commit(model, make_pool(model, store), text(81))
        pool = make_pool(model, store, max_tokens=32)
        held = pool.begin(text(81))
        assert held.get_seq_length() == 32
        assert pool.begin(text(81, seed=1)).get_seq_length() == 0
        pool.check()
        del held


def test_without_text_nothing_of_it_is_on_disk(tmp_path: Path) -> None:
    model, url = make_model(), f"file://{tmp_path}"
    tokens = torch.arange(20)[None] + 100
    with opened(url, keep_text=False) as store:
        commit(model, make_pool(model, store), tokens)
    (path,) = tmp_path.rglob("*.safetensors")
    assert bytes(tokens[0, :2].numpy()) not in path.read_bytes()
    assert found(model, url, tokens) == 16


def test_a_model_that_trains_is_left_as_it_was(tmp_path: Path) -> None:
    model = make_model().train()
    state = torch.random.get_rng_state()
    with opened(f"file://{tmp_path}") as store:
        make_pool(model, store)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_saved_pool_has_its_pages_and_no_store(tmp_path: Path) -> None:
    model = make_model()
    with opened(f"file://{tmp_path}") as store:
        pool = make_pool(model, store)
        commit(model, pool, text(20))
        loaded = pickle.loads(pickle.dumps(pool))  # noqa: S301 (our own)
        loaded.bind(model)
        assert loaded.begin(text(20)).get_seq_length() == 16
    assert "store" not in loaded.report()


@pytest.mark.parametrize("store", ["folder", [], [3]])
def test_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(ArgumentError, match="store must be"):
        make_pool(make_model(), store)
