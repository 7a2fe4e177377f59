"""Kinds of caches that read the same texts, and what is measured of each.

Shapes: B texts read together, Q tokens fed at a time, V words of the model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvloom.caches import FixedLayer, PagedLayer, Sequences
from kvloom.errors import KVError, UnsupportedError
from kvloom.integrations.transformers import KVCache, summary_of
from kvloom.integrations.transformers.cache.layers import KVCacheLayer
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer, keeps_states_elsewhere
from kvloom.measuring.compare import cache_of
from kvloom.measuring.head_errors import ByLayer, halves

LONG: Final = 8192
"""Length of the text for which bytes are given: long, so that a residual window weighs little."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Cache of another library, which is measured like kvloom's.

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
        nbytes_per_encoder_token: Bytes of one token of an encoder, in all layers that attend to it; 0 without
            an encoder.
        encoder_head_errors: As ``head_errors``, of attention to an encoder's tokens.
    """

    kind: str
    nbytes_per_token: float
    perplexity: float
    mean_kl: float
    agreed: float
    num_tokens: int
    head_errors: dict[int, tuple[float, ...]]
    nbytes_per_encoder_token: float = 0.0
    encoder_head_errors: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def worst_head(self) -> tuple[int, int, float] | None:
        """Layer, query head and error of the head with the largest error; ``None`` if none is known.

        Of attention to the text's own tokens; ``worst_encoder_head`` is that of attention to an encoder's.
        """
        return _worst(self.head_errors)

    @property
    def worst_encoder_head(self) -> tuple[int, int, float] | None:
        """As ``worst_head``, of attention to an encoder's tokens."""
        return _worst(self.encoder_head_errors)


def _worst(errors: dict[int, tuple[float, ...]]) -> tuple[int, int, float] | None:
    found = [(layer, head, error) for layer, heads in errors.items() for head, error in enumerate(heads)]
    return max(found, key=lambda each: each[2], default=None)


class Entrant:
    """One kind of cache, and sums over the tokens that it has read."""

    def __init__(self, model: Any, kind: str | Peer) -> None:
        self._model, self._kind = model, kind
        self._chunk = kind.chunk if isinstance(kind, Peer) else None
        self.cache: Any = None
        self._loss = self._kl = 0.0
        self._agreed = self._num_tokens = 0
        self._nbytes: list[float] = []
        self._nbytes_of_encoder = 0.0

    def empty(self) -> Any:
        """Make an empty cache of the kind; a peer may make one half of an encoder-decoder's."""
        kind = self._kind
        cache = kind.make(self._model) if isinstance(kind, Peer) else cache_of(self._model, kind)
        if self._model.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
            return EncoderDecoderCache(cache, DynamicCache())
        return cache

    @torch.no_grad()
    def read(self, tokens: Tensor, given: Mapping[str, Any], *, is_first: bool, num_counted: int) -> Tensor:
        """Read ``[B, Q]``; returns log probabilities ``[B, C, V]`` after each of the last C tokens.

        ``given`` are other arguments of the model: what its encoder made, if it has one.
        """
        if is_first:
            self.cache = self.empty()
        pieces = tokens.split(self._chunk or tokens.shape[1], dim=1)
        arguments = {"use_cache": True, **given, **as_argument(self._model, self.cache)}
        name = "decoder_input_ids" if given else "input_ids"
        if num_counted == 0 and "logits_to_keep" in signature(self._model.forward).parameters:
            arguments["logits_to_keep"] = 1  # logits of a long prompt take gigabytes
        try:
            logits = torch.cat([self._model(**{name: x}, **arguments).logits for x in pieces], dim=1)
        except (AssertionError, NotImplementedError) as error:  # a family's own refusal, as ProphetNet's
            if isinstance(error, KVError):  # some are of these classes, too
                raise
            raise UnsupportedError(
                f"model must read {pieces[0].shape[1]} tokens in one forward, as chunk or after says, got "
                f"{type(self._model).__name__}: {summary_of(error)}"
            ) from error
        own, of_encoder = halves(self.cache)
        self._nbytes.append(_nbytes_per_token(own, len(tokens)))
        if of_encoder is not None:
            self._nbytes_of_encoder = _nbytes_per_token(of_encoder, len(tokens))
        return logits[:, logits.shape[1] - num_counted :].double().log_softmax(-1)

    def expect_kept(self) -> None:
        """Raise UnsupportedError if the model keeps state outside of the cache, shared with other readers."""
        own, of_encoder = halves(self.cache)
        layers = own.layers
        kept = [_nbytes_of(vars(layer)) for layer in layers]
        is_lost = [isinstance(x, StatefulLayer) and not n for x, n in zip(layers, kept, strict=True)]
        has_states_alone = all(getattr(own, "is_linear", [False]))  # some continue these inexactly
        is_elsewhere = keeps_states_elsewhere(self._model)
        if of_encoder is not None:
            is_elsewhere |= not any(_nbytes_of(vars(layer)) for layer in of_encoder.layers)
        if not any(kept) or any(is_lost) or has_states_alone or is_elsewhere:
            raise UnsupportedError(
                f"model must keep all that it has read in its cache, got {type(self._model).__name__}"
            )

    def judge(self, log_probs: Tensor, expected: Tensor, targets: Tensor) -> None:
        """Add the distance of predictions from the ``expected`` ones, and the loss of ``targets``.

        Nothing counts where a target is below 0.
        """
        counts = targets >= 0
        log_probs, expected, targets = log_probs[counts], expected[counts], targets[counts]
        self._loss -= float(log_probs.gather(-1, targets.long().unsqueeze(-1)).sum())
        self._kl += float((expected.exp() * (expected - log_probs)).sum())
        self._agreed += int((expected.argmax(-1) == log_probs.argmax(-1)).sum())
        self._num_tokens += targets.numel()

    def result(self, head_errors: ByLayer, encoder_head_errors: ByLayer) -> Quality:
        """Means over all tokens that were read."""
        return Quality(
            kind=self._kind.name if isinstance(self._kind, Peer) else self._kind,
            nbytes_per_token=sum(self._nbytes) / len(self._nbytes),
            perplexity=math.exp(self._loss / self._num_tokens),
            mean_kl=max(0.0, self._kl / self._num_tokens),
            agreed=self._agreed / self._num_tokens,
            num_tokens=self._num_tokens,
            head_errors=head_errors,
            nbytes_per_encoder_token=self._nbytes_of_encoder,
            encoder_head_errors=encoder_head_errors,
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
