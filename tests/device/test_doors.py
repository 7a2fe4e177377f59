"""Each door once on the device that there is: a CUDA device, or the CPU, where others test them thoroughly.

What is compared is made on the CPU, or by transformers' own caches on the same device. ``make test-gpu`` runs
this.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.models.test_families import FAMILIES, LATENT, family
from integrations.smoothing.test_doors import biased
from oracles.batching import batched, random_requests
from oracles.gathering import gathering
from oracles.language_models import make_model
from torch import Tensor
from transformers import DynamicCache

from kvloom import KVCache, KVPool
from kvloom.ops.fast import steps
from kvloom.store import KVStore

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEW = 8


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def continued(model: Any, tokens: Tensor, cache: Any, **options: Any) -> Tensor:
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW} | options
    return model.generate(tokens, past_key_values=cache, **options)


@contextmanager
def own_stream() -> Iterator[None]:
    """A stream of this thread's own on a CUDA device; its work is done at the end."""
    if DEVICE.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def logits(model: Any, tokens: Tensor, cache: Any, cuts: tuple[int, ...] = (40, 41, 42)) -> Tensor:
    """Of all tokens, fed in pieces that end in ``cuts`` and at the end."""
    found, start = [], int(cache.get_seq_length())
    for end in (*cuts, tokens.shape[1]):
        with torch.no_grad():
            found.append(model(tokens[:, start:end], past_key_values=cache, use_cache=True).logits)
        start = end
    return torch.cat(found, 1).float().cpu()


@pytest.mark.parametrize("kv", ["auto", "int8", "int4", "int4,recent=0"])
@pytest.mark.parametrize("static", [False, True])
def test_caches_give_what_they_give_on_a_cpu(kv: str, static: bool) -> None:
    """Smoothed, rotated, with a residual window and without, growing and fixed."""
    model, tokens = biased(eos_token_id=None), text(60, rows=2)
    how: dict[str, Any] = {"static": True, "max_tokens": 80} if static else {"page_size": 4}
    expected = logits(model, tokens.cpu(), KVCache.for_model(model, kv=kv, **how))
    model = model.to(DEVICE)
    found = logits(model, tokens, KVCache.for_model(model, kv=kv, **how))
    # A number between two codes may become the other one, by rounding: a step of its scale.
    step = {"auto": 1e-4, "int8": 0.02}.get(kv, 0.25)
    assert float((found - expected).abs().max()) <= step * float(expected.abs().max())


@pytest.mark.parametrize(
    ("name", "options"), [("Llama", {}), ("Gemma3", {}), ("DeepSeek-V3", LATENT)], ids=str
)
def test_families_give_the_tokens_of_the_stock_cache(name: str, options: dict[str, Any]) -> None:
    """Windows and latents; rows with padding; beams, which fork pages."""
    model = family(name, **options).to(DEVICE)
    tokens, mask = text(30, rows=2), torch.ones(2, 30, dtype=torch.int64, device=DEVICE)
    mask[0, :5] = 0
    for more in ({}, {"num_beams": 2}):
        expected = continued(model, tokens, DynamicCache(config=model.config), attention_mask=mask, **more)
        model.set_attn_implementation("kvloom")
        found = continued(model, tokens, KVCache.for_model(model, page_size=4), attention_mask=mask, **more)
        model.set_attn_implementation("sdpa" if name != "DeepSeek-V3" else "eager")
        assert torch.equal(found, expected)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="interpreted by tests/ops/test_triton_steps.py")
@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_steps_have_the_bits_of_calls_alone(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = biased(eos_token_id=None).to(DEVICE), text(60, rows=2)
    cuts = tuple(range(40, 60))
    found = logits(model, tokens, KVCache.for_model(model, kv=kv, page_size=4), cuts)
    monkeypatch.setattr(steps, "DEVICES", [])
    assert torch.equal(found, logits(model, tokens, KVCache.for_model(model, kv=kv, page_size=4), cuts))


@pytest.mark.parametrize("window", [None, 100])
def test_prompts_in_bfloat16_are_those_of_torch(window: int | None) -> None:
    """Long enough to be gathered: all at once, in chunks, and behind a window."""
    window_of = (
        {}
        if window is None
        else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    )
    model = biased(eos_token_id=None, **window_of).to(DEVICE, torch.bfloat16)
    tokens = text(1200)
    model.set_attn_implementation("sdpa")
    cuts = (600, 1199)
    expected = logits(model, tokens, DynamicCache(config=model.config), cuts)
    model.set_attn_implementation("kvloom")
    with gathering(512) as calls:
        found = logits(model, tokens, KVCache.for_model(model), cuts)
    assert len(calls) == 2 * model.config.num_hidden_layers
    # Two orders of sums of 8 bits each, through two layers.
    assert float((found - expected).abs().max()) <= 8 * 2.0**-8 * float(expected.abs().max())


def expect_gathered_as_in_place(model: Any, kv: str) -> None:
    """Prompts long enough to be gathered; of a model of one layer, where no rounding moves a code."""
    tokens, found = text(1200), []
    model.to(DEVICE, torch.bfloat16)
    for least_rows in (1 << 40, 512):
        with gathering(least_rows) as calls:
            found.append(logits(model, tokens, KVCache.for_model(model, kv=kv), (600, 1199)))
    assert len(calls) == 2
    in_place, gathered = found
    # Two orders of sums of 8 bits each.
    assert float((gathered - in_place).abs().max()) <= 8 * 2.0**-8 * float(in_place.abs().max())


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_prompts_over_codes_in_bfloat16_are_those_in_place(kv: str) -> None:
    """int4 has a residual window beside its codes."""
    model = biased(eos_token_id=None)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    expect_gathered_as_in_place(model, kv)


@pytest.mark.skipif("gpt-oss" not in FAMILIES, reason="this transformers has no model with sinks")
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("kv", ["auto", "int4:g8"])
def test_prompts_with_sinks_in_bfloat16_are_those_in_place(kind: str, kv: str) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    one = {"num_hidden_layers": 1, "layer_types": [kind], "sliding_window": 100}
    model = family("gpt-oss", "kvloom", **experts, **one)
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks.copy_(torch.linspace(-1, 4, 4))
    expect_gathered_as_in_place(model, kv)


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_a_pool_and_its_store_give_a_prefix_back(kv: str, tmp_path: Path) -> None:
    model, tokens = make_model("kvloom").to(DEVICE), text(40)
    answers = []
    for _ in range(2):  # a pool of its own each time; the second one reads the store
        with KVStore(tmp_path.as_uri(), read="always") as store:
            pool = KVPool.for_model(model, kv=kv, page_size=4, max_tokens=400, store=store)
            for _ in range(2):
                cache = pool.begin(tokens)
                answers.append((int(cache.get_seq_length()), continued(model, tokens, cache)))
                pool.commit(cache, answers[-1][1])
            assert pool.flush()
            pool.check()
    assert [found for found, _ in answers] == [0, 36, 36, 36]
    assert all(torch.equal(answer, answers[0][1]) for _, answer in answers)


@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_pages_wait_in_host_memory_and_come_back(kv: str) -> None:
    """In a pool with room for one text and a half."""
    model, texts = make_model("kvloom").to(DEVICE), [text(40, seed) for seed in range(3)]
    answers = []
    with KVStore("memory://", read="always", max_bytes=64 << 20) as store:
        pool = KVPool.for_model(model, kv=kv, page_size=4, max_tokens=72, store=store)
        for tokens in texts * 2:
            cache = pool.begin(tokens)
            answers.append((int(cache.get_seq_length()), continued(model, tokens, cache)))
            pool.commit(cache, answers[-1][1])
            del cache
            assert pool.flush()
        pool.check()
        assert store.counts["tokens_read"] == 3 * 36
    assert [found for found, _ in answers] == [0] * 3 + [36] * 3
    assert all(torch.equal(answers[i][1], answers[i + 3][1]) for i in range(3))


def test_a_store_is_read_on_one_stream_while_another_computes() -> None:
    """Two threads, each with a model and a pool of its own, take turns in what they read and compute."""
    texts, models = [text(60, seed) for seed in range(4)], [make_model("kvloom").to(DEVICE) for _ in "ab"]
    with KVStore("memory://", read="always", max_bytes=64 << 20) as store:

        def ask(model: Any, numbers: list[int]) -> list[tuple[int, list[int]]]:
            answers = []
            pool = KVPool.for_model(model, kv="int8", page_size=4, max_tokens=120, store=store)
            with own_stream():
                for tokens in (texts[i] for i in numbers):
                    cache = pool.begin(tokens)
                    found = int(cache.get_seq_length())
                    answer = continued(model, tokens, cache)
                    pool.commit(cache, answer)
                    answers.append((found, answer[0].tolist()))
                    del cache
                assert pool.flush()
                pool.check()
            return answers

        expected = ask(models[0], [0, 1, 2, 3])
        with ThreadPoolExecutor(2) as threads:
            reading, computing = threads.map(ask, models, ([0, 1, 2, 3] * 2, [3, 2, 1, 0] * 2))
    assert [found for found, _ in expected] == [0] * 4
    assert reading == [(56, answer) for _, answer in expected] * 2
    assert computing == [(56, answer) for _, answer in reversed(expected)] * 2


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_layers_on_two_devices_keep_and_store_their_pages(kv: str) -> None:
    """On a machine without a second CUDA device the CPU is both, behind accelerate's hooks."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate comes with peft")
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("layers on two devices need two, and there is one CUDA device")
    first, second = ("cuda:0", "cuda:1") if DEVICE.type == "cuda" else ("cpu", "cpu")
    model, tokens = make_model("kvloom"), text(40).to(first)
    halves = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first}
    halves |= dict.fromkeys(("model.layers.1", "model.layers.2", "model.norm", "lm_head"), second)
    expected = continued(make_model("kvloom").to(first), tokens, KVCache.for_model(model, kv=kv))
    model = accelerate.dispatch_model(model, halves, main_device=first, force_hooks=True)
    assert torch.equal(continued(model, tokens, KVCache.for_model(model, kv=kv)), expected)
    with KVStore("memory://", read="always", max_bytes=64 << 20) as store:
        for known in (0, 36):  # a pool of its own each time; the second one reads the store
            pool = KVPool.for_model(model, kv=kv, page_size=4, max_tokens=400, store=store)
            cache = pool.begin(tokens)
            assert cache.get_seq_length() == known
            answer = continued(model, tokens, cache)
            assert torch.equal(answer, expected)
            pool.commit(cache, answer)
            assert pool.flush()


def test_forks_and_crops() -> None:
    model, tokens = make_model("kvloom").to(DEVICE), text(30)
    cache = KVCache.for_model(model, page_size=4)
    first = logits(model, tokens, cache, (20,))
    fork = cache.fork()
    cache.crop(-10)
    again = logits(model, tokens, cache, ())
    torch.testing.assert_close(again, first[:, 20:], rtol=1e-3, atol=1e-3)
    more = logits(model, torch.cat([tokens, text(5, 1)], 1), fork, ())
    assert more.shape[1] == 5


def test_caches_are_saved_and_loaded(tmp_path: Path) -> None:
    model, tokens = make_model("kvloom").to(DEVICE), text(30)
    cache = KVCache.for_model(model, kv="int8", page_size=4)
    logits(model, tokens[:, :20], cache, ())
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert torch.equal(logits(model, tokens, loaded, ()), logits(model, tokens, cache, ()))


def test_a_session_gives_each_request_its_own_tokens() -> None:
    model = make_model().to(DEVICE)
    requests = random_requests(6, seed=3, vocab=99)
    found = batched(model, requests, NEW, max_batch_tokens=64)
    model.set_attn_implementation("sdpa")
    for request, own in zip(requests, found, strict=True):
        ids = torch.tensor([request], device=DEVICE)
        expected = continued(model, ids, DynamicCache(config=model.config), eos_token_id=None)
        assert own == expected[0, len(request) :].tolist()
