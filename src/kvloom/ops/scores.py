"""Description of an attention call: new and stored tokens of a batch, and the formula of their scores."""

from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from kvloom.core.indexing import CacheIndex
from kvloom.core.memo import Memo

MAX_PAIRS: Final = 64
"""Maximum number of cosines of a positional bias, and of sines."""


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Numbers of tokens of the sequences of one ``Batch``, on the host, as FlashAttention's ``max_seqlen_k``.

    Where they are known, a prompt on a GPU can be computed over keys that are gathered for it.

    Attributes:
        new: Number of new tokens of each sequence.
        stored: Number of its stored tokens, the new ones included.
        first: Number of its stored tokens that are hidden in front, as ``first_visible``; ``None`` for 0.
    """

    new: tuple[int, ...]
    stored: tuple[int, ...]
    first: tuple[int, ...] | None = None
    # What follows from them for the batch's index, once for all layers.
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Memo):
    """Ragged batch of B sequences: its new tokens, and the slots of its stored tokens.

    Attributes:
        index: Slots of every stored token, the new ones included.
        seqstarts: ``[B + 1]``, new tokens of sequence b are rows ``seqstarts[b]:seqstarts[b + 1]``.
        kvstarts: ``[B + 1]``, sequence b has ``kvstarts[b + 1] - kvstarts[b]`` tokens, its new ones last.
        decoding_batches: Number of sequences at the front that get no causal mask.
        first_visible: ``[B]`` int64 or int32, stored tokens of sequence b before this one are hidden, such as
            left padding or evicted tokens; ``None`` for 0.
        counts: The same numbers on the host; ``None`` if they are on the device alone.
        is_fixed: Whether nobody writes to these tensors as long as the batch is used, so that what the first
            layer of a step works out on a GPU, such as the work of each program, holds for all others.
    """

    index: CacheIndex
    seqstarts: Tensor
    kvstarts: Tensor
    decoding_batches: int = 0
    first_visible: Tensor | None = None
    counts: Counts | None = None
    is_fixed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PositionalBias:
    """Bias of rank 2K of the products of queries and keys, by the position of the key.

    The product of query row t and head g with token j of sequence b, of key/value head h, gets

        ``sum over i of coefficients[t, g, i] * cos(frequencies[h, i] * p)
        + coefficients[t, g, K + i] * sin(frequencies[h, i] * p)`` with ``p = first_position[b] + j``.

    It is part of the product: the scale multiplies it and the soft cap bounds it. It restores the products of
    keys from which an offset that rotates as RoPE was subtracted: ``KeyOffset.bias``. For a bias that is
    linear in the position see ``Scores.alibi_slopes``.

    Attributes:
        coefficients: ``[Tq, Hq, 2K]`` float32, float16 or bfloat16, of K cosines, then of K sines; K is at
            most 64.
        frequencies: ``[H, K]`` float64 or float32, radians from one position to the next.
        first_position: ``[B]`` int64 or int32, position in its text of token 0 of each sequence of the index;
            ``None`` for 0.
    """

    coefficients: Tensor
    frequencies: Tensor
    first_position: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Formula of scores: ``softcap((q.k + bias) * scale) + mask + alibi``, then causal mask and window.

    The last new token has the position of the last stored one (bottom-right alignment). The query at position
    p sees the key at position j if

    * ``j <= p``, if causal or with ALiBi,
        * ``j > p - window``, if there is a window,
        * ``j >= first_visible[b]``, if the batch has it.

    Attributes:
        scale: Factor of the dot product, ``1 / sqrt(D)`` if ``None``.
        is_causal: Hide later keys, except from the first ``decoding_batches`` sequences.
        mask: Added to the scores, ``[Tq, >= Tkv]`` or ``[Hq, Tq, >= Tkv]``, of which the blocks of rows
            ``seqstarts[b]:`` and columns ``kvstarts[b]:`` are read.
        alibi_slopes: ``[Hq]``, adds ``slope * (j - p)`` and hides later keys from every sequence.
        window: Number of keys that a query sees, its own included.
        softcap: ``softcap * tanh(score / softcap)``, before the mask.
        sinks: ``[Hq]``, a logit of each head in the softmax, without a value.
        positional_bias: ``bias`` of each product ``q.k``, by the position of the key.
    """

    scale: float | None = None
    is_causal: bool = True
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    positional_bias: PositionalBias | None = None


CAUSAL = Scores()
