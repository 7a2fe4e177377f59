"""Traces of requests in Mooncake's format: times, lengths and shared blocks."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from kvloom.errors import ArgumentError

BLOCK_TOKENS: Final = 512
"""Tokens of a block, which has one id."""


class Request(NamedTuple):
    """Request of a trace.

    Attributes:
        timestamp: Milliseconds from the beginning.
        input_length: Number of tokens of the prompt.
        output_length: Number of tokens of the answer.
        hash_ids: Ids of the blocks of the prompt, of which the last may be partly filled; equal ids mean
            equal blocks after equal blocks.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int | None = None) -> Iterator[Request]:
    """Read the first ``count`` requests, or all.

    Args:
        path: JSON lines with ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens,
            and ``hash_ids`` of the blocks of 512 tokens of the input.
        count: Number of requests; ``None`` for all.

        Raises:
            ArgumentError: the file cannot be read, or a line is no request.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, count), 1):
                yield _request(number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"trace must be a file of JSON lines: {error}") from error


def paged(requests: Sequence[Request], page_size: int) -> Sequence[Request]:
    """Convert prompts to pages of another size: ``hash_ids`` become those of pages, the last partly filled.

    A page of several blocks has the id of the last block, which identifies all tokens before it, too. The id
    of a page within a block comes from the block and the place: a trace does not have prefixes that two
    blocks share.

    Args:
        requests: Requests in blocks.
        page_size: Number of tokens, a multiple or a divisor of 512.

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
    """Every ``step``-th block, and the last block."""
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ArgumentError(
        f"trace must have timestamp, input_length, output_length and hash_ids in line {number}, "
        f"got {line.strip()[:60]!r}"
    )
