"""What a kind of cache costs in quality.

Expected figures come from transformers' own cache, a softmax in loops and hooks on the output projections.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from core.spellings import BAD
from oracles.language_models import FakeQuantCache4, make_model
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicLayer

import kvloom
from kvloom import KVCache
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.measuring.quality import Peer, windows_of

CHUNK = 8


def texts_of(num_texts: int, num_tokens: int) -> Tensor:
    return torch.randint(0, 64, (num_texts, num_tokens), generator=torch.Generator().manual_seed(1))


class OneLayerRounded(FakeQuantCache4):
    """Rounds one layer and keeps the others as they are."""

    rounded = 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        update = FakeQuantCache4.update if layer_idx == self.rounded else DynamicCache.update
        return update(self, key, value, layer_idx, *args, **kwargs)


@torch.no_grad()
def probabilities(model: Any, texts: Tensor, cache: Any) -> Tensor:
    """``[N, W - 1, V]``, fed in chunks; the softmax is written out."""
    chunks = texts[:, :-1].split(CHUNK, dim=1)
    logits = torch.cat([model(x, past_key_values=cache, use_cache=True).logits for x in chunks], dim=1)
    weights = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


@torch.no_grad()
def outputs_of(model: Any, texts: Tensor, cache: Any, layer: int) -> Tensor:
    """Attention's output ``[N, W - 1, Hq, D]`` in a layer, as its projection gets it."""
    seen: list[Tensor] = []
    projection = model.model.layers[layer].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    probabilities(model, texts, cache)
    handle.remove()
    return torch.cat(seen, dim=1).unflatten(-1, (model.config.num_attention_heads, -1)).double()


def make_window_model() -> MistralForCausalLM:
    torch.manual_seed(3)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.25,
            sliding_window=10,
        )
    ).eval()


@pytest.mark.parametrize("make", [make_model, make_window_model])
def test_figures_are_those_of_transformers_own_cache_with_rounded_tokens(make: Callable[[], Any]) -> None:
    model, texts = make(), texts_of(3, 30)
    p = probabilities(model, texts, DynamicCache(config=model.config))
    q = probabilities(model, texts, FakeQuantCache4(config=model.config))
    stock, int4 = kvloom.quality(model, texts, ["int4:g16,rotate=none,recent=0"], chunk=CHUNK)
    count = p[..., 0].numel()
    targets = texts[:, 1:].unsqueeze(-1)
    for row, each in ((stock, p), (int4, q)):
        loss = -sum(math.log(x) for x in each.gather(-1, targets).flatten().tolist()) / count
        assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        assert row.num_tokens == count
    kl = sum(a * math.log(a / b) for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True))
    assert int4.mean_kl == pytest.approx(kl / count, rel=1e-3)
    assert int4.agreed == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert (stock.mean_kl, stock.agreed) == (0.0, 1.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvloom"])
def test_errors_of_heads_are_of_one_layer_where_all_else_is_exact(attention: str) -> None:
    model, texts = make_model(attention), texts_of(3, 30)
    stock, int4 = kvloom.quality(model, texts, ["int4:g16,rotate=none,recent=0"], chunk=CHUNK)
    assert stock.head_errors == {}
    assert stock.worst_head is None
    assert int4.head_errors.keys() == {0, 1, 2}
    assert model.config._attn_implementation == attention
    for layer, heads in int4.head_errors.items():
        cache = OneLayerRounded(config=model.config)
        cache.rounded = layer
        exact = outputs_of(model, texts, DynamicCache(config=model.config), layer)
        error = (outputs_of(model, texts, cache, layer) - exact).square().sum((0, 1, 3))
        expected = (error / exact.square().sum((0, 1, 3))).sqrt()
        torch.testing.assert_close(torch.tensor(heads).double(), expected, rtol=1e-4, atol=0.0)
    layer, head, error = int4.worst_head
    assert error == int4.head_errors[layer][head] == max(map(max, int4.head_errors.values()))


def test_peer_is_measured_as_it_is_fed() -> None:
    model, texts = make_model(), texts_of(2, 30)
    sizes: list[int] = []

    class Recording(FakeQuantCache4):
        def update(self, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            sizes.append(key.shape[2])
            return super().update(key, *args, **kwargs)

    peer = Peer("rounded", lambda model: Recording(config=model.config), chunk=4)
    _, ours, theirs = kvloom.quality(model, texts, ["int4:g16,rotate=none,recent=0", peer], chunk=CHUNK)
    assert theirs.kind == "rounded"
    assert theirs.nbytes_per_token == 768  # rounded, and kept in float32
    assert theirs.mean_kl == pytest.approx(ours.mean_kl, rel=1e-3)
    assert theirs.head_errors[2] == pytest.approx(ours.head_errors[2], rel=1e-4)
    assert 4 in sizes


def test_bytes_of_a_window_are_of_the_tokens_that_it_holds() -> None:
    stock, ours, int8 = kvloom.quality(make_window_model(), texts_of(2, 30), ["float32", "int8:g16"])
    assert stock.nbytes_per_token == ours.nbytes_per_token == 2 * 2 * 2 * 16 * 4
    assert int8.nbytes_per_token == 2 * 2 * 2 * (16 + 2)


def test_newest_tokens_are_spread_over_a_long_text() -> None:
    class Layer(DynamicLayer):
        """Keeps the newest four tokens as they are and a byte of each element of the others."""

        def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            key, value = super().update(key, value, *args, **kwargs)
            self._quantized_keys, self._quantized_values = (x[:, :, :-4].byte() for x in (key, value))
            self.keys, self.values = (x[:, :, -4:].clone() for x in (key, value))
            return key, value

        def get_seq_length(self) -> int:
            return self._quantized_keys.shape[2] + 4 if self.is_initialized else 0

    def make(model: Any) -> Any:
        cache = DynamicCache(config=model.config)
        cache.layers = [Layer() for _ in cache.layers]
        return cache

    kinds = ["int8:g16", "int8:g16,recent=20", Peer("theirs", make, chunk=30)]
    _, plain, recent, theirs = kvloom.quality(make_model(), texts_of(2, 31), kinds)
    assert recent.nbytes_per_token == plain.nbytes_per_token + (32 + 16) * 768 / 8192
    assert theirs.nbytes_per_token == pytest.approx((192 * 8188 + 768 * 4) / 8192)


def test_enabled_model_is_compared_with_transformers_own_cache() -> None:
    from kvloom.integrations.transformers import enable

    model = make_model()
    enable(model, kv="int4:g16,recent=0")
    stock, int4 = kvloom.quality(model, texts_of(2, 30), ["int4:g16,recent=0"])
    assert stock.nbytes_per_token == 768
    assert int4.mean_kl > 0.0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_float_cache_is_the_model_itself(chunk: int) -> None:
    model, texts = make_model(), texts_of(9, 20)
    stock, ours = kvloom.quality(model, texts, ["float32"], chunk=chunk)
    with torch.no_grad():
        logits = model(texts[:, :-1]).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
    assert stock.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert ours.perplexity == pytest.approx(stock.perplexity, rel=1e-6)
    assert ours.mean_kl < 1e-9
    assert ours.agreed == 1.0
    assert stock.nbytes_per_token == ours.nbytes_per_token == 768
    assert stock.num_tokens == 9 * 19


def test_fewer_bits_are_fewer_bytes_and_more_error() -> None:
    rows = kvloom.quality(make_model(), texts_of(2, 40), ["float16", "int8", "int4,recent=0"])
    assert [row.kind for row in rows] == ["DynamicCache", "float16", "int8", "int4,recent=0"]
    assert [row.nbytes_per_token for row in rows] == [768, 384, 216, 120]
    errors = [row.mean_kl for row in rows]
    assert errors == sorted(errors)
    assert errors[0] == 0.0
    assert errors[-1] > 10 * errors[-2]


def test_same_text_gives_the_same_figures_one_by_one_or_together() -> None:
    model, texts = make_model(), texts_of(3, 33)
    (_, together) = kvloom.quality(model, texts, ["int4,recent=0"])
    alone = [kvloom.quality(model, text[None], ["int4,recent=0"])[1] for text in texts]
    assert together.mean_kl == pytest.approx(sum(row.mean_kl for row in alone) / 3, rel=1e-4)
    assert together.agreed == pytest.approx(sum(row.agreed for row in alone) / 3)


def test_steps_are_told() -> None:
    steps: list[tuple[int, int]] = []
    kvloom.quality(make_model(), texts_of(9, 21), ["int8"], chunk=8, on_step=lambda *x: steps.append(x))
    assert steps == [(i + 1, 6) for i in range(6)]


@pytest.mark.parametrize(
    "texts",
    [
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.zeros(0, 8),
        torch.zeros(2, 8),
    ],
)
def test_texts_that_are_none_are_named(texts: Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"^input_ids must be \[N, W\]"):
        kvloom.quality(make_model(), texts)


@pytest.mark.parametrize("kind", BAD)
def test_unknown_kind_is_named_before_anything_is_read(kind: str) -> None:
    with pytest.raises(ArgumentError, match=r"^kv must"):
        kvloom.quality(None, texts_of(1, 4), ["int8", kind])


def test_chunk_of_nothing_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^chunk must be at least 1, got 0"):
        kvloom.quality(make_model(), texts_of(1, 4), chunk=0)


def test_only_what_is_predicted_behind_enough_tokens_counts() -> None:
    model, texts = make_model(), texts_of(2, 40)
    whole, first = (kvloom.quality(model, x, ["int4:g16,recent=0"])[1] for x in (texts, texts[:, :16]))
    last = kvloom.quality(model, texts, ["int4:g16,recent=0"], after=15)[1]
    assert (whole.num_tokens, first.num_tokens, last.num_tokens) == (78, 30, 48)
    sums = [x.num_tokens * x.mean_kl for x in (whole, first, last)]
    assert sums[0] == pytest.approx(sums[1] + sums[2])
    assert last.mean_kl > 0


@torch.no_grad()
def decoded(model: Any, texts: Tensor, cache: Any, prompt: int) -> Tensor:
    """``[N, C, V]`` probabilities of what follows each token behind a prompt, fed one by one."""
    if prompt:
        model(texts[:, :prompt], past_key_values=cache, use_cache=True)
    steps = texts[:, prompt:-1].split(1, dim=1)
    logits = [model(x, past_key_values=cache, use_cache=True).logits for x in steps]
    return torch.cat(logits, dim=1).double().softmax(-1)


@pytest.mark.parametrize("prompt", [0, 1, 20, 28])
@pytest.mark.parametrize("kind", ["int4:g16,recent=0", "int8:g16,recent=8"])
def test_decoding_is_a_prompt_and_one_token_at_a_time(kind: str, prompt: int) -> None:
    model, texts = make_model(), texts_of(2, 30)
    p = decoded(model, texts, DynamicCache(config=model.config), prompt)
    q = decoded(model, texts, KVCache.for_model(model, kind), prompt)
    stock, row = kvloom.quality(model, texts, [kind], after=prompt, decode=True)
    loss = -p.gather(-1, texts[:, prompt + 1 :].unsqueeze(-1)).log().mean()
    assert stock.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert row.num_tokens == 2 * (29 - prompt)
    assert row.mean_kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3)
    assert row.agreed == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_nothing_of_a_prompt_counts_and_its_logits_are_not_computed() -> None:
    model, texts = make_model(), texts_of(2, 30)
    sizes: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _, args, out: sizes.append(out.shape[1]))
    _, short = kvloom.quality(model, texts, ["int4:g16,recent=0"], after=20, decode=True)
    handle.remove()
    assert set(sizes) == {1}
    exact = [outputs_of(model, texts, DynamicCache(config=model.config), 0)[:, 20:]]
    exact += [outputs_of(model, texts, FakeQuantCache4(config=model.config), 0)[:, 20:] - exact[0]]
    output, error = (x.square().sum((0, 1, 3)) for x in exact)
    plain = kvloom.quality(model, texts, ["int4:g16,rotate=none,recent=0"], after=20, decode=True)[1]
    assert plain.head_errors[0] == pytest.approx((error / output).sqrt().tolist(), rel=1e-3)
    assert short.head_errors.keys() == plain.head_errors.keys()


@pytest.mark.parametrize("after", [-1, 3])
def test_nothing_that_counts_is_named(after: int) -> None:
    with pytest.raises(ArgumentError, match=rf"^after must be from 0 to 2, got {after}"):
        kvloom.quality(make_model(), texts_of(1, 4), after=after)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertModel", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}),
        ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1}),
        (
            "RecurrentGemmaForCausalLM",
            {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 32,
             "intermediate_size": 64},
        ),
        ("RwkvForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kinds", [[], ["int8:g8"]])
def test_a_model_whose_reading_is_not_in_its_cache_alone_is_refused(
    name: str, options: dict[str, Any], kinds: list[str]
) -> None:
    made = getattr(transformers, name)
    model = made(made.config_class(vocab_size=64, pad_token_id=0, **options)).eval()
    with pytest.raises(UnsupportedError, match=rf"^model must .*{name}"):
        kvloom.quality(model, texts_of(2, 20), kinds, chunk=CHUNK)


class Letters:
    """A tokenizer: a token of each letter."""

    def __call__(self, text: str, verbose: bool) -> Any:
        return type("Encoding", (), {"input_ids": [ord(x) for x in text]})


@pytest.mark.parametrize(
    ("texts", "num_tokens", "shape"),
    [(["abc", "defg"], 100, (1, 7)), (["abcdefghij"], 100, (2, 4)), (["abcdefghij"], 4, (1, 4))],
)
def test_windows_are_full(texts: list[str], num_tokens: int, shape: tuple[int, int]) -> None:
    window = 4 if shape[1] == 4 else 512
    windows = windows_of(Letters(), texts, num_tokens, window=window)
    assert windows.shape == shape
    assert bytes(windows.flatten().tolist()).decode() == "".join(texts)[: windows.numel()]


def test_too_short_a_text_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^--text must hold at least 2 tokens, got 1"):
        windows_of(Letters(), ["a"], 100, "--text")
