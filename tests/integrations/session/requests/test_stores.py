"""A session with a store below its pages: what another session, process or pool computed is found."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.batching import Session, add_between_steps, alone, random_requests, session
from oracles.pairs import in_turn
from oracles.watched_store import watched_store

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVPool, continuous_batching
from kvloom.store import KVStore

NEW = 8
KINDS = {"Llama": "auto", "Gemma3": "int8:g4", "Mistral": "int4:g2,recent=20", "Gemma4": "float16"}
KINDS |= {"DeepSeek-V3": "auto", "gpt-oss": "int4:g2,recent=0"}


def url_of(folder: Path) -> str:
    return f"file://{folder}/store"


@contextmanager
def session_with_store(
    folder: Path, model: Any, kv: str = "auto", store: KVStore | None = None, **options: Any
) -> Iterator[Session]:
    """A session whose store has everything once it has ended."""
    store = KVStore(url_of(folder), read="always") if store is None else store
    continuous_batching(model, kv, store=store)
    try:
        with session(model, {"max_new_tokens": NEW}, **options) as running:
            yield running
        running.manager.batch_processor.cache.reset()
        assert store.flush()
    finally:
        continuous_batching(model, None)


def tokens_of(running: Session, requests: list[list[int]], **options: Any) -> list[list[int]]:
    names = running.manager.add_requests(requests, **options)
    running.run()
    assert [running.outputs[name].error for name in names] == [None] * len(requests)
    return [running.outputs[name].generated_tokens for name in names]


def stem(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 99) for _ in range(length)]


def prompts() -> list[list[int]]:
    return [stem(100) + stem(length, length) for length in (3, 30, 45)]


def whole_pages(requests: list[list[int]]) -> int:
    """Tokens that all of them can be found with."""
    return sum((len(request) - 1) // 16 * 16 for request in requests)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_new_session_begins_with_what_another_stored(name: str, tmp_path: Path) -> None:
    requests = prompts()
    with session_with_store(tmp_path, family(name), KINDS[name], max_batch_tokens=64) as running:
        expected = tokens_of(running, requests)
    with session_with_store(tmp_path, family(name), KINDS[name], max_batch_tokens=64) as running:
        assert tokens_of(running, requests) == expected
        assert running.manager.report().tokens_found == whole_pages(requests)
        assert running.manager.report().store["tokens_read"] > 0


def test_answers_are_stored_with_their_prompts(tmp_path: Path) -> None:
    model, prompt = family("Llama"), stem(60)
    with session_with_store(tmp_path, model) as running:
        [answer] = tokens_of(running, [prompt])
    turn = prompt + answer + stem(20, 2)
    expected = [alone(model, turn, NEW)]
    with session_with_store(tmp_path, model) as running:
        assert tokens_of(running, [turn]) == expected
        assert running.manager.report().tokens_found == (len(prompt) + NEW - 1) // 16 * 16


@pytest.mark.parametrize("kv", ["auto", "int8:g4", "int4:g4,recent=20"])
def test_pools_and_sessions_find_what_the_other_stored(kv: str, tmp_path: Path) -> None:
    model, first, second = family("Gemma3", "kvloom"), stem(100, 1), stem(80, 2)

    def pool() -> KVPool:
        store = KVStore(url_of(tmp_path), read="always")
        return KVPool.for_model(model, kv, max_tokens=4096, store=store, batch_invariant=True)

    own = pool()
    cache = own.begin(torch.tensor([first]))
    out = model.generate(torch.tensor([first]), past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    own.commit(cache, out)
    own.close()
    with session_with_store(tmp_path, model, kv) as running:
        tokens_of(running, [first, second])
        assert running.manager.report().tokens_found == 96
    with pool() as own:
        assert own.begin(torch.tensor([second])).get_seq_length() == 64


@pytest.mark.parametrize(("batch_invariant", "found"), [(True, 96), (None, 0)])
def test_a_session_has_its_bits_whatever_a_pool_stored(
    batch_invariant: bool | None, found: int, tmp_path: Path
) -> None:
    """By default the layers of a pool in bfloat16 are batch invariant, and its model's attention is not."""
    model, text = family("Llama").to(torch.bfloat16), stem(100)

    def scores(folder: Path) -> list[float]:
        with session_with_store(folder, model, return_logprobs=True) as running:
            [name] = running.manager.add_requests([text])
            running.run()
            assert running.manager.report().tokens_found == (found if folder == tmp_path else 0)
        return list(running.outputs[name].logprobs)

    expected, store = scores(tmp_path / "other"), KVStore(url_of(tmp_path), read="always")
    with KVPool.for_model(model, max_tokens=400, store=store, batch_invariant=batch_invariant) as pool:
        cache, ids = pool.begin(torch.tensor([text])), torch.tensor([text])
        model.generate(ids, past_key_values=cache, max_new_tokens=1)
        pool.commit(cache, ids)
    assert store.flush()
    assert scores(tmp_path) == expected


OTHER = """
import sys
from pathlib import Path
from integrations.session.requests.test_stores import family, prompts, session_with_store, tokens_of

with session_with_store(Path(sys.argv[1]), family("Gemma3")) as running:
    print(tokens_of(running, prompts()), running.manager.report().tokens_found)
"""


@pytest.mark.process
def test_another_process_finds_it(tmp_path: Path) -> None:
    requests = prompts()
    with session_with_store(tmp_path, family("Gemma3")) as running:
        expected = tokens_of(running, requests)
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    folder = Path(__file__).parents[3]
    process = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    assert process.stdout == f"{expected} {whole_pages(requests)}\n", process.stderr


def test_what_was_stored_under_another_salt_is_not_found(tmp_path: Path) -> None:
    model, prompt = family("Llama"), stem(60)
    with session_with_store(tmp_path, model) as running:
        tokens_of(running, [prompt], cache_salt="mine")
    for salt, found in (("", 0), ("yours", 0), ("mine", 48)):
        with session_with_store(tmp_path, model) as running:
            tokens_of(running, [prompt], cache_salt=salt)
            assert running.manager.report().tokens_found == found


def test_another_model_finds_nothing_and_the_same_one_again_does(tmp_path: Path) -> None:
    model, prompt = family("Llama"), stem(60)
    weight = model.model.layers[1].mlp.down_proj.weight

    def found() -> int:
        expected = [alone(model, prompt, NEW)]
        with session_with_store(tmp_path, model) as running:
            assert tokens_of(running, [prompt]) == expected
            return int(running.manager.report().tokens_found)

    before = weight.detach().clone()
    assert [found(), found()] == [0, 48]
    weight.data.mul_(1.5)
    assert [found(), found()] == [0, 48]
    weight.data.copy_(before)
    assert found() == 48


def test_a_model_that_changes_within_a_session_neither_reads_nor_writes(tmp_path: Path) -> None:
    model, prompt, other = family("Llama"), stem(60), stem(60, 2)
    with session_with_store(tmp_path, model) as running:
        tokens_of(running, [prompt])
    with session_with_store(tmp_path, model) as running:
        model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)
        tokens_of(running, [prompt, other])
        assert running.manager.report().tokens_found == 0
    assert "runs_saved" not in running.manager.report().store
    with session_with_store(tmp_path, model) as running:
        tokens_of(running, [prompt, other])
        assert running.manager.report().tokens_found == 0


def test_requests_run_while_the_store_of_another_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, slow, quick = family("Llama"), stem(60), stem(40, 2)
    with session_with_store(tmp_path, model) as running:
        expected = tokens_of(running, [slow])
    quick_tokens = alone(model, quick, NEW)
    may_go_on, load = threading.Event(), KVStore.load

    def slow_load(*args: Any, **options: Any) -> Any:
        assert may_go_on.wait(60)
        return load(*args, **options)

    monkeypatch.setattr(KVStore, "load", slow_load)
    with session_with_store(tmp_path, model) as running:
        names = running.manager.add_requests([slow, slow, quick])
        while names[2] not in running.outputs:
            assert running.step()
        assert running.outputs[names[2]].generated_tokens == quick_tokens
        assert not {*names[:2]} & {*running.outputs}
        assert not running.step()  # nothing else is left to do
        may_go_on.set()
        while not running.cache.requests.prefixes.reads.is_done(names[0]):
            time.sleep(0.01)
        running.run()
        assert [running.outputs[name].generated_tokens for name in names[:2]] == expected * 2
        assert running.manager.report().tokens_found == 2 * 48
        assert running.manager.report().store["tokens_read"] == 48


def test_a_request_that_is_cancelled_while_its_store_is_read_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt, other = family("Llama"), stem(60), stem(40, 2)
    with session_with_store(tmp_path, model) as running:
        tokens_of(running, [prompt])
    may_go_on, load = threading.Event(), KVStore.load
    monkeypatch.setattr(KVStore, "load", lambda *args, **how: may_go_on.wait(60) and load(*args, **how))
    with session_with_store(tmp_path, model) as running:
        names = running.manager.add_requests([prompt, other])
        running.step()
        reads = running.cache.requests.prefixes.reads
        assert [reads.has(name) for name in names] == [True, False]
        running.manager.cancel_request(names[0])
        running.run()
        assert not reads.has(names[0]) and running.outputs[names[1]].error is None
        may_go_on.set()


def test_what_is_damaged_is_computed(tmp_path: Path) -> None:
    model, prompt = family("Llama"), stem(60)
    with session_with_store(tmp_path, model) as running:
        expected = tokens_of(running, [prompt])
    for run in (tmp_path / "store").rglob("*.safetensors"):
        data = bytearray(run.read_bytes())
        data[-5] ^= 1
        run.write_bytes(data)
    with session_with_store(tmp_path, model) as running:
        running.manager.record()
        assert tokens_of(running, [prompt]) == expected
        assert running.manager.report().tokens_found == 0
        assert running.manager.report().store["stores"][url_of(tmp_path)]["damaged"] > 0


@pytest.mark.parametrize(
    ("name", "num_blocks", "seed"), in_turn(["Llama", "Gemma3", "Mistral"], [12, 20, 200], [0, 1, 2])
)
def test_random_sessions_one_after_the_other(name: str, num_blocks: int, seed: int, tmp_path: Path) -> None:
    """With few pages, where reading evicts what others may find, and preemption."""
    model, draw = family(name), random.Random(seed)
    requests = random_requests(8, seed)
    expected = {tuple(request): alone(model, request, NEW) for request in requests}
    for _ in range(2):
        options = {"num_blocks": num_blocks, "max_batch_tokens": draw.choice([16, 64, 200])}
        with session_with_store(tmp_path, model, **options) as running:
            names = add_between_steps(running, requests, draw)
            for number, request in names.items():
                assert running.outputs[number].generated_tokens == expected[tuple(request)]
    assert running.manager.report().store["tokens_read"] > 0


def test_what_is_refused(tmp_path: Path) -> None:
    model = family("Llama")
    with pytest.raises(ArgumentError, match="share must be True with a store, got False"):
        continuous_batching(model, share=False, store=url_of(tmp_path))
    with pytest.raises(ArgumentError, match="store must be a URL"):
        continuous_batching(model, store="nowhere://x")
    # Before transformers 5.24 sessions take no such model at all.
    with pytest.raises(
        UnsupportedError, match=r"^(store must be None for a model with|model must .*) recurrent"
    ):
        continuous_batching(family("Falcon-H1"), store=url_of(tmp_path))
    assert "init_continuous_batching" not in vars(model)


def test_pages_of_idle_conversations_wait_in_host_memory_and_come_back() -> None:
    """In turn, where the session has pages for one of them; the store never has more than it may."""
    model, new = family("Llama"), [stem(60, seed) for seed in range(4)]
    answers: dict[str, list[list[int]]] = {}
    with watched_store("idle") as (url, backend):
        for limit in (1 << 40, 0):
            store = KVStore(url, read="always", max_bytes=limit)
            texts, answers[str(limit)] = [[*x] for x in new], []
            with session_with_store(Path(), model, "int8:g4", store, num_blocks=8) as running:
                found = []
                for turn in range(2):
                    for text in texts:
                        before = running.manager.report().tokens_found
                        [answer] = tokens_of(running, [text])
                        found.append(running.manager.report().tokens_found - before)
                        answers[str(limit)].append(answer)
                        assert store.flush()
                        text += answer + stem(9, 50 + turn)
                assert found == [0] * 4 + [0 if limit == 0 else 64] * 4
                assert running.manager.report().store.get("tokens_read", 0) == sum(found)
            if limit:
                most = backend.nbytes
                for x in [*backend.list_stored()]:
                    backend.delete(x.name)
        assert backend.nbytes == 0 and backend.most == most
    assert answers[str(1 << 40)] == answers["0"]
