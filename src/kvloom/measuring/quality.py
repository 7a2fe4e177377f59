"""Quality of kinds of caches: change of a model's predictions, and bytes.

Shapes: N texts, W tokens of each, B of them read together, Q tokens fed at a time, V words of the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache

from kvloom.core.arguments import expect_least, expect_within
from kvloom.core.checks import INDEX_DTYPES
from kvloom.core.spelling import expect_kv
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.models.positions import expect_positions
from kvloom.measuring.compare import STOCK, expect_decoder, expect_generating
from kvloom.measuring.encoder_inputs import encoded, expect_encoder_inputs
from kvloom.measuring.entrants import LONG, Entrant, Peer, Quality
from kvloom.measuring.head_errors import HeadErrors

__all__ = [
    "LONG",
    "ROWS",
    "WINDOW",
    "Peer",
    "Quality",
    "expect_decoder",
    "quality",
    "windows_of",
]

WINDOW: Final = 512
"""Number of tokens of a text of ``windows_of``."""
ROWS: Final = 8
"""Maximum number of texts that are read together."""


def quality(
    model: Any,
    input_ids: Tensor,
    kv: Sequence[str | Peer] = ("int8", "int4"),
    *,
    encoder_inputs: Mapping[str, Tensor] | None = None,
    chunk: int = 32,
    after: int = 0,
    decode: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Quality]:
    """Feed texts through a ``DynamicCache`` and through each kind of cache, and compare the predictions.

    A text is fed in chunks, so that attention reads earlier tokens from the cache, much as in decoding; or
    exactly as in decoding, which takes longer. The attention is the model's own. For an encoder-decoder the
    texts are the decoder's; its encoder runs once for all kinds, and keys and values of both are cached.

    Args:
        model: A ``PreTrainedModel`` that generates.
        input_ids: ``[N, W]`` int64 or int32, W of at least 2 and at most the positions of the model. Shorter
            texts end with ids below 0, which do not count.
        kv: Kinds of caches, as of ``KVCache.for_model``, files of plans included, and peers.
        encoder_inputs: For an encoder-decoder, what the encoder reads for each text: arguments of the model
            by name, such as ``input_features`` of audio, or ``input_ids`` and ``attention_mask`` of
            documents, each ``[N, ...]``.
        chunk: Number of tokens fed at a time.
        after: Predictions after at most this many tokens of a text are not counted. Errors of heads are
            counted for all tokens.
        decode: Whether the first ``after`` tokens are fed at once, as a prompt that does not count, and all
            others one by one, as in ``generate``; ``chunk`` is then ignored.
        on_step: Called after each step with the number of steps done and of all steps.

    Returns:
        DynamicCache first, then the kinds in their order.

    Raises:
        ArgumentError: an argument has another value.
        UnsupportedError: the model does not generate, or keeps states outside of its cache.
    """
    is_tokens = isinstance(input_ids, Tensor) and input_ids.dim() == 2 and input_ids.dtype in INDEX_DTYPES
    if not is_tokens or input_ids[:, 1:].numel() == 0:
        got = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else input_ids
        raise ArgumentError(
            f"input_ids must be [N, W] int64 or int32 with at least 2 tokens in a text, got {got!s:.60}"
        )
    expect_least("chunk", chunk, 1)
    expect_within("after", after, 0, input_ids.shape[1] - 2)
    for kind in kv:
        if not isinstance(kind, Peer):
            expect_kv("kv", kind)
    expect_generating(model)
    inputs = expect_encoder_inputs(model, encoder_inputs, len(input_ids))
    expect_positions("input_ids", model, input_ids.shape[1])
    _expect_ends(input_ids, after)
    stock = Entrant(model, Peer(STOCK, lambda model: DynamicCache(config=model.config)))
    entrants = [stock, *(Entrant(model, kind) for kind in kv)]
    sizes = _sizes(input_ids.shape[1] - 1, chunk, after if decode else None)
    starts = [0, *accumulate(sizes[:-1])]
    steps = [
        (rows, *piece)
        for rows in torch.arange(len(input_ids)).split(ROWS)
        for piece in zip(starts, sizes, strict=True)
    ]
    errors = HeadErrors(model, [entrant.empty for entrant in entrants[1:]], lambda: stock.cache)
    given: dict[str, Any] = {}
    for done, (rows, start, size) in enumerate(steps, 1):
        if start == 0 and inputs:
            given = encoded(model, {name: x[rows].to(model.device) for name, x in inputs.items()})
        ids = input_ids[rows].to(model.device)
        targets, tokens = ids[:, start + 1 : start + size + 1], ids[:, start : start + size]
        is_text, tokens = tokens >= 0, tokens.clamp(min=0)
        num_counted = min(max(start + size - after, 0), size)
        expected = None
        for entrant in entrants:
            counts = is_text if not decode or num_counted > 0 else None
            is_measured = errors.measured(is_first=start == 0, counts=counts)
            with is_measured if entrant is stock else nullcontext():
                log_probs = entrant.read(tokens, given, is_first=start == 0, num_counted=num_counted)
            if expected is None:
                entrant.expect_kept()
                expected = log_probs
            entrant.judge(log_probs, expected, targets[:, size - num_counted :])
        if on_step is not None:
            on_step(done, len(steps))
    found = zip([{}, *errors.result()], [{}, *errors.of_encoder()], strict=True)
    return [entrant.result(*each) for entrant, each in zip(entrants, found, strict=True)]


def _sizes(num_tokens: int, chunk: int, prompt: int | None) -> list[int]:
    """Numbers of tokens to feed: ``prompt`` tokens, then one by one; or chunks if ``prompt`` is ``None``."""
    if prompt is None:
        return [min(chunk, num_tokens - i) for i in range(0, num_tokens, chunk)]
    return [*([prompt] if prompt else []), *[1] * (num_tokens - prompt)]


def _expect_ends(input_ids: Tensor, after: int) -> None:
    """Check that ids below 0 are at ends of texts, and leave a token to predict."""
    is_end = input_ids < 0
    if bool(is_end[:, 0].any()) or bool((is_end[:, :-1] & ~is_end[:, 1:]).any()):
        raise ArgumentError(
            "input_ids must have ids below 0 only at the ends of texts, got one before a token"
        )
    if bool(is_end[:, after + 1 :].all()):
        raise ArgumentError(f"input_ids must have a text of more than {after + 1} tokens, got none")


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
        raise ArgumentError(f"{name} must have at least 2 tokens, got {len(ids)}")
    width = min(window, len(ids))
    return torch.tensor(ids[: len(ids) // width * width]).view(-1, width)
