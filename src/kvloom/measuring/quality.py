"""Quality of kinds of caches: change of a model's predictions, and bytes.

Shapes: N texts, W tokens of each, B of them read together, Q tokens fed at a time, V words of the model.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvloom.caches import FixedLayer, PagedLayer, Sequences
from kvloom.core.arguments import expect_least, expect_within
from kvloom.core.checks import INDEX_DTYPES
from kvloom.core.spelling import expect_kv
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer, keeps_states_elsewhere
from kvloom.integrations.transformers.models.positions import expect_positions
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.measuring.compare import STOCK, cache_of
from kvloom.measuring.head_errors import HeadErrors

WINDOW: Final = 512
"""Number of tokens of a text of ``windows_of``."""
ROWS: Final = 8
"""Maximum number of texts that are read together."""
LONG: Final = 8192
"""Length of the text for which bytes are given: long, so that a residual window weighs little."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Cache of another library, to be measured beside kvloom's.

    Attributes:
        name: Name in the result.
        make: Function that makes an empty one for a model.
        chunk: Maximum number of tokens fed at a time; ``None`` for that of the others.
    """

    name: str
    make: Callable[[Any], Any]
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """Results of one kind of cache on some texts.

    Attributes:
        kind: ``"DynamicCache"``, a kind as ``KVCache.for_model`` takes it as ``kv``, or a peer's name.
        nbytes_per_token: Cache bytes of one token in all layers, scales included, in a text of 8,192 tokens,
            over which those of a residual window are spread.
        perplexity: Exponential of the mean loss of the next tokens.
        mean_kl: Mean of KL(DynamicCache || kind) of the next-token distributions, in nats.
        agreed: Share of positions with the same next token, from 0 to 1.
        num_tokens: Number of predicted tokens.
        head_errors: By layer, for each query head: the norm of the error of attention's output divided by
            that of the output, where only this layer's keys and values come from the cache. Empty for
            DynamicCache, and if the model's attention cannot be replaced.
    """

    kind: str
    nbytes_per_token: float
    perplexity: float
    mean_kl: float
    agreed: float
    num_tokens: int
    head_errors: dict[int, tuple[float, ...]]

    @property
    def worst_head(self) -> tuple[int, int, float] | None:
        """Layer, query head and error of the head with the largest error; ``None`` if none is known."""
        found = [(x, n, error) for n, heads in self.head_errors.items() for x, error in enumerate(heads)]
        if not found:
            return None
        head, layer, error = max(found, key=lambda each: each[2])
        return layer, head, error


def quality(
    model: Any,
    input_ids: Tensor,
    kv: Sequence[str | Peer] = ("int8", "int4"),
    *,
    chunk: int = 32,
    after: int = 0,
    decode: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Quality]:
    """Feed texts through a ``DynamicCache`` and through each kind of cache, and compare the predictions.

    A text is fed in chunks, so that attention reads earlier tokens from the cache, much as in decoding; or
    exactly as in decoding, which takes longer. The attention is the model's own.

    Args:
        model: A ``PreTrainedModel`` that generates.
        input_ids: ``[N, W]`` int64 or int32, W of at least 2 and at most the positions of the model.
        kv: Kinds of caches, as of ``KVCache.for_model``, files of plans included, and peers.
        chunk: Number of tokens fed at a time.
        after: Predictions after at most this many tokens of a text are not counted; errors of heads are.
        decode: Whether the first ``after`` tokens are fed at once, as a prompt that does not count, and all
            others one by one, as in ``generate``; ``chunk`` is then ignored.
        on_step: Called after each step with the number of steps done and of all steps.

    Returns:
        DynamicCache first, then the kinds in their order.

    Raises:
        ArgumentError: an argument is no such value.
        UnsupportedError: the model has an encoder, does not generate, or keeps states outside of its cache.
    """
    is_tokens = isinstance(input_ids, Tensor) and input_ids.dim() == 2 and input_ids.dtype in INDEX_DTYPES
    if not is_tokens or input_ids[:, 1:].numel() == 0:
        got = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else input_ids
        raise ArgumentError(
            f"input_ids must be [N, W] int64 or int32 of at least 2 tokens a text, got {got!s:.60}"
        )
    expect_least("chunk", chunk, 1)
    expect_within("after", after, 0, input_ids.shape[1] - 2)
    for kind in kv:
        if not isinstance(kind, Peer):
            expect_kv("kv", kind)
    expect_decoder(model)
    expect_positions("input_ids", model, input_ids.shape[1])
    stock = _Entrant(model, Peer(STOCK, lambda model: DynamicCache(config=model.config)))
    entrants = [stock, *(_Entrant(model, kind) for kind in kv)]
    sizes = _sizes(input_ids.shape[1] - 1, chunk, after if decode else None)
    starts = [0, *accumulate(sizes[:-1])]
    steps = [
        (rows, *piece)
        for rows in input_ids.to(model.device).split(ROWS)
        for piece in zip(starts, sizes, strict=True)
    ]
    errors = HeadErrors(model, [entrant.empty for entrant in entrants[1:]])
    for done, (rows, start, size) in enumerate(steps, 1):
        tokens, targets = rows[:, start : start + size], rows[:, start + 1 : start + size + 1]
        num_counted = min(max(start + size - after, 0), size)
        expected = None
        for entrant in entrants:
            is_measured = errors.measured(is_first=start == 0, counts=not decode or num_counted > 0)
            with is_measured if entrant is stock else nullcontext():
                log_probs = entrant.read(tokens, is_first=start == 0, num_counted=num_counted)
            if expected is None:
                entrant.expect_kept()
                expected = log_probs
            entrant.judge(log_probs, expected, targets[:, size - num_counted :])
        if on_step is not None:
            on_step(done, len(steps))
    found = [{}, *errors.result()]
    return [entrant.result(each) for entrant, each in zip(entrants, found, strict=True)]


def _sizes(num_tokens: int, chunk: int, prompt: int | None) -> list[int]:
    """Numbers of tokens to feed: ``prompt`` tokens, then one by one; or chunks if ``prompt`` is ``None``."""
    if prompt is None:
        return [min(chunk, num_tokens - i) for i in range(0, num_tokens, chunk)]
    return [*([prompt] if prompt else []), *[1] * (num_tokens - prompt)]


def expect_decoder(model: Any) -> None:
    """Raise UnsupportedError unless a model generates by a decoder alone; ArgumentError if it is none."""
    text_config_of(model)
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UnsupportedError(
            f"model must be one that generates, without an encoder, got {type(model).__name__}"
        )


def windows_of(
    tokenizer: Any, texts: Iterable[str], num_tokens: int, name: str = "texts", window: int = WINDOW
) -> Tensor:
    """Cut the tokens of concatenated texts into windows ``[N, W]``; a partial last window is dropped.

    Args:
        tokenizer: Tokenizer of the model.
        texts: Texts, read until there are enough tokens.
        num_tokens: Maximum number of tokens.
        name: Name of ``texts`` in errors.
        window: W; all tokens if they are fewer.

    Raises:
        ArgumentError: there are fewer than 2 tokens.
    """
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False).input_ids
        if len(ids) >= num_tokens:
            break
    ids = ids[:num_tokens]
    if len(ids) < 2:
        raise ArgumentError(f"{name} must hold at least 2 tokens, got {len(ids)}")
    width = min(window, len(ids))
    return torch.tensor(ids[: len(ids) // width * width]).view(-1, width)


class _Entrant:
    """One kind of cache, and sums over the tokens that it has read."""

    def __init__(self, model: Any, kind: str | Peer) -> None:
        self._model, self._kind = model, kind
        self._chunk = kind.chunk if isinstance(kind, Peer) else None
        self._cache: Any = None
        self._loss = self._kl = 0.0
        self._agreed = self._num_tokens = 0
        self._nbytes: list[float] = []

    def empty(self) -> Any:
        """Make an empty cache of the kind."""
        kind = self._kind
        return kind.make(self._model) if isinstance(kind, Peer) else cache_of(self._model, kind)

    @torch.no_grad()
    def read(self, tokens: Tensor, *, is_first: bool, num_counted: int) -> Tensor:
        """Read ``[B, Q]``; returns log probabilities ``[B, C, V]`` after each of the last C tokens."""
        if is_first:
            self._cache = self.empty()
        pieces = tokens.split(self._chunk or tokens.shape[1], dim=1)
        arguments = as_argument(self._model, self._cache)
        if num_counted == 0 and "logits_to_keep" in signature(self._model.forward).parameters:
            arguments["logits_to_keep"] = 1  # logits of a long prompt take gigabytes
        logits = torch.cat([self._model(x, use_cache=True, **arguments).logits for x in pieces], dim=1)
        self._nbytes.append(_nbytes_per_token(self._cache, len(tokens)))
        return logits[:, logits.shape[1] - num_counted :].double().log_softmax(-1)

    def expect_kept(self) -> None:
        """Raise UnsupportedError if the model keeps state outside of the cache, shared with other readers."""
        layers = self._cache.layers
        kept = [_nbytes_of(vars(layer)) for layer in layers]
        is_lost = [isinstance(x, StatefulLayer) and not n for x, n in zip(layers, kept, strict=True)]
        has_states_alone = all(getattr(self._cache, "is_linear", [False]))  # some continue these inexactly
        is_elsewhere = keeps_states_elsewhere(self._model)
        if not any(kept) or any(is_lost) or has_states_alone or is_elsewhere:
            raise UnsupportedError(
                f"model must keep what it has read in its cache alone, got {type(self._model).__name__}"
            )

    def judge(self, log_probs: Tensor, expected: Tensor, targets: Tensor) -> None:
        """Add the distance of predictions from the ``expected`` ones, and the loss of ``targets``."""
        self._loss -= float(log_probs.gather(-1, targets.long().unsqueeze(-1)).sum())
        self._kl += float((expected.exp() * (expected - log_probs)).sum())
        self._agreed += int((expected.argmax(-1) == log_probs.argmax(-1)).sum())
        self._num_tokens += targets.numel()

    def result(self, head_errors: dict[int, tuple[float, ...]]) -> Quality:
        """Means over all tokens that were read."""
        return Quality(
            kind=self._kind.name if isinstance(self._kind, Peer) else self._kind,
            nbytes_per_token=sum(self._nbytes) / len(self._nbytes),
            perplexity=math.exp(self._loss / self._num_tokens),
            mean_kl=max(0.0, self._kl / self._num_tokens),
            agreed=self._agreed / self._num_tokens,
            num_tokens=self._num_tokens,
            head_errors=head_errors,
        )


def _nbytes_recent(pages: PagedLayer | FixedLayer, num_rows: int) -> float:
    """Bytes of the residual window of a sequence of ``LONG`` tokens."""
    if not isinstance(pages, PagedLayer) or not pages.nbytes_recent:
        return pages.nbytes_recent / num_rows
    residual = Sequences(pages.sequences.format, pages.window).of_residual()
    exact = pages.residual
    if residual is None or exact is None:
        return 0.0
    residual.reserve(1, LONG)
    num_slots = residual.pages.pool.num_pages * residual.format.page_size
    return num_slots * exact.storages[pages.index].nbytes_per_token


def _nbytes_per_token(cache: Any, num_rows: int) -> float:
    """Bytes of one of ``LONG`` tokens in the layers that hold it, without other states."""
    if isinstance(cache, KVCache):
        pages = [layer.pages for layer in cache.layers if isinstance(layer, KVCacheLayer)]
        return cache.nbytes_per_token + sum(_nbytes_recent(x, num_rows) for x in pages) / LONG
    total = 0.0
    for layer in cache.layers:
        keys: Any = getattr(layer, "keys", None)
        if keys is None:
            continue
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):  # a window holds only its tokens
            total += (keys.nbytes + layer.values.nbytes) / (num_rows * keys.shape[-2])
        elif isinstance(keys, Tensor):
            held, num_tokens, num_exact, exact = _nbytes_of(vars(layer)), int(layer.get_seq_length()), 0, 0
            if hasattr(layer, "_quantized_keys") and keys.dim() == 4:  # its residual window
                num_exact, exact = keys.shape[-2], keys.nbytes + layer.values.nbytes
            of_code = (held - exact) / (num_tokens - num_exact)
            total += (of_code * (LONG - num_exact) + exact) / (num_rows * LONG)
    return total


def _nbytes_of(x: Any) -> int:
    """Bytes of the tensors in ``x``; for a tensor subclass, of its inner tensors."""
    if isinstance(x, Tensor):
        names = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else ()
        return sum(_nbytes_of(getattr(x, name)) for name in names) if names else x.nbytes
    if isinstance(x, dict):
        x = [*x.values()]
    return sum(map(_nbytes_of, x)) if isinstance(x, list | tuple) else 0
