"""Conversations to ask a server for, made up or after a trace: texts of words, each of about one token."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvloom.simulation.trace import BLOCK_TOKENS, read_trace

_WORDS: Final = (
    "and as assert break class continue def del elif else except finally for from if import in is not or "
    "pass raise return try while with yield None True False self print len range open file name path"
).split()


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to a conversation.

    Attributes:
        text: Behind all that was said before.
        new_tokens: That are asked for.
    """

    text: str
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests one after the other, each of which begins with the one before and its answer.

    Attributes:
        turns: At least one.
        seconds: From the beginning to the first of them; 0 for as soon as a client is free.
    """

    turns: tuple[Turn, ...]
    seconds: float = 0.0


def words(count: int, seed: object) -> str:
    """A text of ``count`` words, always the same for a seed."""
    return "".join(f" {word}" for word in random.Random(repr(seed)).choices(_WORDS, k=count))


def chats(count: int, num_turns: int, system: int, own: int, new: int) -> list[Conversation]:
    """``count`` requests in conversations of ``num_turns`` with one system prompt.

    Args:
        count: Requests.
        num_turns: Of each conversation; the last one may have fewer.
        system: Words of the system prompt.
        own: Words of each turn.
        new: Tokens of each answer.
    """
    made = []
    for first in range(0, count, num_turns):
        turns = [Turn(words(own, number), new) for number in range(first, min(first + num_turns, count))]
        begin = Turn(words(system, "system") + turns[0].text, new)
        made.append(Conversation((begin, *turns[1:])))
    return made


def replay(path: Path, count: int, scale: float, speed: float) -> list[Conversation]:
    """The first ``count`` requests of a trace, made smaller.

    Args:
        path: As of ``read_trace``.
        count: Requests.
        scale: Lengths are divided by it.
        speed: Times are divided by it.

    Raises:
        ArgumentError: as ``read_trace``.
    """
    made = []
    for request in read_trace(path, count):
        lengths = [BLOCK_TOKENS] * (len(request.hash_ids) - 1)
        lengths.append(request.input_length - sum(lengths))
        text = "".join(
            words(max(1, round(n / scale)), x) for n, x in zip(lengths, request.hash_ids, strict=True)
        )
        turn = Turn(text, max(1, round(request.output_length / scale)))
        made.append(Conversation((turn,), request.timestamp / 1000 / speed))
    return made
