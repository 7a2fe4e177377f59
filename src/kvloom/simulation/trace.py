"""Traces in Mooncake's format: which requests came when, and which blocks they have in common."""

import json
from collections.abc import Iterator
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
        hash_ids: Of the blocks of the prompt, the last one partly filled; equal ids are equal blocks behind
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
