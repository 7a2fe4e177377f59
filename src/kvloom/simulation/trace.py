"""Traces of requests in Mooncake's format: times, lengths and shared blocks."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from kvloom.errors import ArgumentError

BLOCK_TOKENS: Final = 512
"""Tokens of a block, which has one id, if a trace gives no ``block_size``."""


_GIVEN: Final = ("timestamp", "input_length", "output_length", "hash_ids")
"""Fields that every line has."""


class Request(NamedTuple):
    """Request of a trace.

    Attributes:
        timestamp: Milliseconds from the beginning.
        input_length: Number of tokens of the prompt.
        output_length: Number of tokens of the answer.
        hash_ids: Ids of the blocks of the prompt, of which the last may be partly filled; equal ids mean
            equal blocks after equal blocks.
        block_size: Tokens of a block.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int = BLOCK_TOKENS


def read_trace(path: Path) -> Iterator[Request]:
    """Read the requests of a file.

    Args:
        path: JSON lines with ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens,
            and ``hash_ids`` of the blocks of the input, of 512 tokens or, if it is given, of ``block_size``.

    Raises:
        ArgumentError: the file cannot be read, a line is no request, or it has blocks of another size.
    """
    size: int | None = None
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                request = _request(number, line)
                size = size or request.block_size
                if request.block_size != size:
                    raise ArgumentError(
                        f"trace must have the same block_size in all lines, {size}, got "
                        f"{request.block_size} in line {number}"
                    )
                yield request
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"trace must be a file of JSON lines: {error}") from error


def paged(requests: Sequence[Request], page_size: int) -> Sequence[Request]:
    """Convert prompts to pages of another size: ``hash_ids`` become those of pages, the last partly filled.

    A page of several blocks has the id of the last block, which also identifies all tokens before it. The id
    of a page within a block comes from the id of the block and the place in it, since a trace does not say
    which tokens two blocks share.

    Args:
        requests: Requests in blocks.
        page_size: Number of tokens, a multiple or a divisor of the size of a block.

    Raises:
        ArgumentError: ``page_size`` is neither.
    """
    block = requests[0].block_size if requests else BLOCK_TOKENS
    if page_size < 1 or (page_size % block and block % page_size):
        raise ArgumentError(f"page_size must be a multiple or a divisor of {block}, got {page_size}")
    if page_size == block:
        return requests
    if page_size > block:
        step = page_size // block
        return [x._replace(hash_ids=_last_of_each(x.hash_ids, step), block_size=page_size) for x in requests]
    numbers: dict[tuple[int, int], int] = {}
    made = []
    for x in requests:
        parts = ((own, i) for own in x.hash_ids for i in range(block // page_size))
        num_pages = -(-x.input_length // page_size)
        pages = [numbers.setdefault(part, len(numbers)) for part in islice(parts, num_pages)]
        made.append(x._replace(hash_ids=pages, block_size=page_size))
    return made


def _last_of_each(blocks: list[int], step: int) -> list[int]:
    """Every block whose number is a multiple of ``step``, counted from 1, and the last block."""
    return blocks[step - 1 :: step] + (blocks[-1:] if len(blocks) % step else [])


def _request(number: int, line: str) -> Request:
    try:
        found = json.loads(line)
        request = Request(**{name: found[name] for name in Request._fields if name in {*_GIVEN, *found}})
        numbers = request.input_length, request.output_length, request.block_size
        is_read = all(type(x) is int for x in (*numbers, *request.hash_ids)) and request.timestamp >= 0
        if not is_read or min(numbers) < 0 or request.block_size < 1:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(
            f"trace must have {', '.join(_GIVEN[:-1])} and {_GIVEN[-1]} in line {number}, and may have "
            f"block_size, got {line.strip()[:60]!r}"
        ) from error
    if not request.input_length:
        raise ArgumentError(f"trace must have an input_length of at least 1, got 0 in line {number}")
    num_blocks = -(-request.input_length // request.block_size)
    if len(request.hash_ids) != num_blocks:
        raise ArgumentError(
            f"trace must have {num_blocks} hash_ids in line {number}, one for each {request.block_size} "
            f"tokens ({'its' if 'block_size' in found else 'the usual'} block_size) of its input_length "
            f"{request.input_length}, got {len(request.hash_ids)}"
        )
    return request
