"""Traces in Mooncake's format: which requests came when, and which blocks they have in common."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from kvloom.errors import ArgumentError

BLOCK_TOKENS: Final = 512
"""Tokens that one id stands for."""


class Request(NamedTuple):
    """One request.

    Attributes:
        timestamp: Milliseconds from the beginning.
        input_length: Tokens of the prompt.
        output_length: Tokens of the answer.
        hash_ids: Of the blocks of the prompt, the last one partly filled; equal ids are equal blocks after
            equal blocks.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int | None = None) -> Iterator[Request]:
    """The first ``count`` requests, or all.

    Args:
        path: JSON lines with ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens,
            and ``hash_ids`` of the blocks of 512 tokens of the input.
        count: Requests.

    Raises:
        ArgumentError: the file cannot be read, or a line is none of a trace.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, count), 1):
                yield _request(number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"trace must be a file of JSON lines: {error}") from error


def paged(requests: Sequence[Request], page_size: int) -> Sequence[Request]:
    """The same prompts in pages of another size: ``hash_ids`` are those of the pages, the last partly filled.

    A page of several blocks has the id of the last of these, which stands for all tokens before, too. Pages
    of a part of a block are told apart by the block and their place in it: what two blocks have in common at
    their beginning, a trace does not say.

    Args:
        requests: In blocks.
        page_size: Tokens, a multiple or a divisor of 512.

    Raises:
        ArgumentError: it is neither.
    """
    if page_size < 1 or (page_size % BLOCK_TOKENS and BLOCK_TOKENS % page_size):
        raise ArgumentError(f"page_size must be a multiple or a divisor of {BLOCK_TOKENS}, got {page_size}")
    if page_size >= BLOCK_TOKENS:
        step = page_size // BLOCK_TOKENS
        return [x._replace(hash_ids=_last_of_each(x.hash_ids, step)) for x in requests]
    numbers: dict[tuple[int, int], int] = {}
    made = []
    for x in requests:
        parts = ((block, i) for block in x.hash_ids for i in range(BLOCK_TOKENS // page_size))
        num_pages = -(-x.input_length // page_size)
        made.append(
            x._replace(hash_ids=[numbers.setdefault(part, len(numbers)) for part in islice(parts, num_pages)])
        )
    return made


def _last_of_each(blocks: list[int], step: int) -> list[int]:
    """Every ``step``-th block, and the last one."""
    return blocks[step - 1 :: step] + (blocks[-1:] if len(blocks) % step else [])


def _request(number: int, line: str) -> Request:
    try:
        found = json.loads(line)
        request = Request(*(found[name] for name in Request._fields))
        last = request.input_length - BLOCK_TOKENS * (len(request.hash_ids) - 1)
        if (
            all(type(x) is int for x in (*request[1:3], *request.hash_ids))
            and 0 < last <= BLOCK_TOKENS
            and request.output_length >= 0
            and request.timestamp >= 0
        ):
            return request
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ArgumentError(
        f"trace must have timestamp, input_length, output_length and hash_ids in line {number}, "
        f"got {line.strip()[:60]!r}"
    )
