"""Conversations for measuring a server, generated or from a trace: texts of words of about one token each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvloom.simulation.trace import read_trace

_WORDS: Final = (
    "and as assert break class continue def del elif else except finally for from if import in is not or "
    "pass raise return try while with yield None True False self print len range open file name path"
).split()


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: the texts that it adds, and the number of new tokens.

    Attributes:
        pieces: Texts in order, which follow all earlier texts of the conversation.
        new_tokens: Number of new tokens that are requested.
    """

    pieces: tuple[str, ...]
    new_tokens: int

    @property
    def text(self) -> str:
        """The pieces as one text."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests in order, each of which begins with the one before and its answer.

    Attributes:
        turns: The requests, at least one.
        seconds: Time of the first request after the start; 0 for as soon as a client is free.
    """

    turns: tuple[Turn, ...]
    seconds: float = 0.0


def words(count: int, seed: object) -> str:
    """A text of ``count`` random words, the same for the same seed."""
    return "".join(f" {word}" for word in random.Random(repr(seed)).choices(_WORDS, k=count))


def chats(count: int, num_turns: int, system: int, own: int, new: int, seed: int) -> list[Conversation]:
    """``count`` requests in conversations of ``num_turns`` with one system prompt.

    Args:
        count: Number of requests.
        num_turns: Number of turns of each conversation; the last one may have fewer.
        system: Number of words of the system prompt.
        own: Number of words of each turn.
        new: Number of tokens of each answer.
        seed: Seed of the texts.
    """
    begin, made = words(system, (seed, "system")), []
    for first in range(0, count, num_turns):
        texts = [words(own, (seed, number)) for number in range(first, min(first + num_turns, count))]
        turns = [Turn((begin, texts[0]), new), *(Turn((text,), new) for text in texts[1:])]
        made.append(Conversation(tuple(turns)))
    return made


def replay(path: Path, count: int, scale: float, speed: float, seed: int) -> list[Conversation]:
    """The first ``count`` requests of a trace, scaled down.

    Args:
        path: As in ``read_trace``.
        count: Number of requests.
        scale: Divisor of lengths.
        speed: Divisor of times.
        seed: Seed of the texts.

    Raises:
        ArgumentError: as ``read_trace``.
    """
    made = []
    for request in read_trace(path, count):
        lengths = [request.block_size] * (len(request.hash_ids) - 1)
        lengths.append(request.input_length - sum(lengths))
        pieces = [
            words(max(1, round(n / scale)), (seed, x)) for n, x in zip(lengths, request.hash_ids, strict=True)
        ]
        turn = Turn(tuple(pieces), max(1, round(request.output_length / scale)))
        made.append(Conversation((turn,), request.timestamp / 1000 / speed))
    return made


def arriving(conversations: Sequence[Conversation], rate: float, seed: int) -> list[Conversation]:
    """The same conversations, with start times of a Poisson process.

    Args:
        conversations: Conversations in order.
        rate: Average number of conversations that begin per second.
        seed: Seed of the times.
    """
    draw, seconds, made = random.Random(repr((seed, "arrivals"))), 0.0, []
    for conversation in conversations:
        seconds += draw.expovariate(rate)
        made.append(replace(conversation, seconds=seconds))
    return made


def repeated(conversations: list[Conversation]) -> float:
    """Share of the words of all prompts, from 0 to 1, that repeat a prefix of earlier prompts and answers.

    A server that keeps all words finds this share. An answer counts as one word per token.
    """
    seen, num_repeated, num_words = set[int](), 0, 0
    for number, conversation in enumerate(conversations):
        said: list[tuple[object, int]] = []
        for turn in conversation.turns:
            said += [(piece, piece.count(" ")) for piece in turn.pieces]
            prefix, known = 0, True
            for piece, count in said:
                prefix = hash((prefix, piece))
                known = known and prefix in seen
                seen.add(prefix)
                num_words += count
                num_repeated += count * known
            said.append(((number, len(said)), turn.new_tokens))
            seen.add(hash((prefix, said[-1][0])))
    return num_repeated / max(num_words, 1)
