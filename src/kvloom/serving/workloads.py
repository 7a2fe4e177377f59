"""Conversations to ask a server for, made up or after a trace: texts of words, each of about one token."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from kvloom.errors import ArgumentError

_WORDS: Final = (
    "and as assert break class continue def del elif else except finally for from if import in is not or "
    "pass raise return try while with yield None True False self print len range open file name path"
).split()
_BLOCK_TOKENS: Final = 512
"""Tokens that one id of a trace stands for."""


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
        path: JSON lines with ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens,
            and ``hash_ids`` of the blocks of 512 tokens of the input: Mooncake's format.
        count: Requests.
        scale: Lengths are divided by it.
        speed: Times are divided by it.

    Raises:
        ArgumentError: the file cannot be read, or a line is none of a trace.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return list(_requests(islice(lines, count), scale, speed))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"trace must be a file of JSON lines: {error}") from error


def _requests(lines: Iterator[str], scale: float, speed: float) -> Iterator[Conversation]:
    for number, line in enumerate(lines, 1):
        try:
            request = json.loads(line)
            ids = request["hash_ids"]
            lengths = [_BLOCK_TOKENS] * (len(ids) - 1)
            lengths.append(request["input_length"] - sum(lengths))
            text = "".join(words(max(1, round(n / scale)), x) for n, x in zip(lengths, ids, strict=True))
            new_tokens = max(1, round(request["output_length"] / scale))
            yield Conversation((Turn(text, new_tokens),), request["timestamp"] / 1000 / speed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"trace must have timestamp, input_length, output_length and hash_ids in line {number}, "
                f"got {line.strip()[:60]!r}"
            ) from error
