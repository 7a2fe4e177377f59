"""Key-value recall: records amid noise, and far behind them questions whose answers stand in the records.

A record is a key of one symbol and a value of three; a question is the key again, and its answer the value.
Whoever reads a value has to find a place in the text three times: behind the key, and behind each symbol of
the value but the last. No symbol is in two places of the records.

Shapes: B texts, W tokens of each, R records and Q questions of each.
"""

import random
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

VALUE: Final = 3
"""Symbols of a value."""
RECORD: Final = 1 + VALUE
"""Tokens of a record, and of a question with its answer."""
SYMBOLS: Final = range(288)
"""Tokens that records are made of."""
NOISE: Final = range(288, 320)
"""All other tokens."""
MOST_RECORDS: Final = len(SYMBOLS) // RECORD


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one length.

    Attributes:
        tokens: ``[B, W]`` int64; the last ``Q * RECORD`` are questions with their answers.
        distances: ``[B, Q]`` int64: tokens from the start of a record to that of its question.
    """

    tokens: Tensor
    distances: Tensor

    @property
    def prompt(self) -> int:
        """Tokens before the first question."""
        return self.tokens.shape[1] - self.distances.shape[1] * RECORD


def make_texts(
    rng: random.Random, rows: int, length: int, *, records: int, questions: int, gap: int = 0
) -> Texts:
    """Draw texts.

    Args:
        rng: Draws them.
        rows: B.
        length: W.
        records: R, at most ``MOST_RECORDS``.
        questions: Q, each of another record, in no order.
        gap: Tokens of noise between the last record and the first question, or more.

    Raises:
        ValueError: so many records and questions do not fit.
    """
    room = length - questions * RECORD - gap
    if not (questions <= records <= MOST_RECORDS and records * RECORD <= room):
        raise ValueError(
            f"records must be from {questions} to {min(MOST_RECORDS, room // RECORD)}, got {records}"
        )
    drawn = [_text(rng, room, records, questions, gap) for _ in range(rows)]
    return Texts(torch.tensor([x for x, _ in drawn]), torch.tensor([x for _, x in drawn]))


def _text(
    rng: random.Random, room: int, records: int, questions: int, gap: int
) -> tuple[list[int], list[int]]:
    """Tokens of a text, and distances of its questions."""
    symbols = rng.sample(SYMBOLS, records * RECORD)
    drawn = [symbols[i : i + RECORD] for i in range(0, len(symbols), RECORD)]
    num_places = room - records * (RECORD - 1)
    places = set(rng.sample(range(num_places), records))
    tokens: list[int] = []
    starts: list[int] = []
    for place in range(num_places):
        if place in places:
            starts.append(len(tokens))
            tokens += drawn[len(starts) - 1]
        else:
            tokens.append(rng.choice(NOISE))
    tokens += rng.choices(NOISE, k=gap)
    distances = []
    for asked in rng.sample(range(records), questions):
        distances.append(len(tokens) - starts[asked])
        tokens += drawn[asked]
    return tokens, distances


def answers(next_tokens: Tensor) -> Tensor:
    """What follows the tokens of each question but its last: ``[B, Q, VALUE, ...]``.

    Args:
        next_tokens: What follows each, or its logits, ``[B, Q * RECORD, ...]``.
    """
    return next_tokens.unflatten(1, (-1, RECORD))[:, :, :VALUE]


def expected_answers(texts: Texts) -> Tensor:
    """The values that are asked for, ``[B, Q, VALUE]`` int64."""
    return answers(pad(texts.tokens[:, texts.prompt + 1 :], (0, 1)))


@torch.no_grad()
def answered(model: Any, texts: Texts, cache: Any) -> Tensor:
    """Which questions a model answers exactly by greedy decoding, ``[B, Q]`` bool.

    The prompt is read at once, and every token behind it alone. What is read of an answer is the right one,
    so that no question suffers from a mistake in one before. All of an answer is right in the same cases.

    Args:
        model: Called with tokens, ``cache``, ``use_cache`` and ``logits_to_keep``; gives ``logits``.
        texts: What is read.
        cache: An empty one.
    """
    steps = [texts.prompt, *[1] * (texts.tokens.shape[1] - texts.prompt)]
    chosen = [
        model(x, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        for x in texts.tokens.split(steps, dim=1)
    ]
    return (answers(torch.cat(chosen[1:], dim=1)) == expected_answers(texts)).all(-1)
