"""Tile sizes and launch options, pinned so that results are reproducible.

Others are used only within ``tuned``. Another tile of attention changes the order of sums, so bits may
change; another tile of moves does not.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple


class Config(NamedTuple):
    """Launch configuration of one path of attention.

    Attributes:
        rows: Query rows of a tile, a power of two, at least 16; or 8 for few new tokens, in transposed tiles.
        tokens: Stored tokens of a tile, a power of two from 16 to ``attending.plan.RUN_UNIT``.
        num_warps: Warps of a program.
        num_stages: Number of tiles of tokens in flight.
        programs: Programs of each multiprocessor; items are distributed to them.
        reads_once: Whether latents without scales are read once, as keys, and transposed to be values; so
            are those of tiles of ``attend.LEAST_SHARED_ROWS`` rows and more.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    programs: int
    reads_once: bool = False


class Case(NamedTuple):
    """Kind of call with its own pinned or tuned configuration.

    Attributes:
        is_split: Whether there are few new tokens, or many.
        itemsize: Bytes of an element of the query.
        bits: Bits of a code of the keys, 0 without scales.
        head_dim: Smallest power of two of at least both head dims; for latents without their rope keys.
        ratio: Query heads for each key/value head.
        rope_dim: Head dim of the rope keys of latents, 0 without.
    """

    is_split: bool
    itemsize: int
    bits: int
    head_dim: int
    ratio: int
    rope_dim: int = 0


Tuned = Mapping[Case, Config]
"""Configurations that were measured on one device."""


class Tile(NamedTuple):
    """What a program of ``store`` and ``load`` moves at once, and its warps.

    Attributes:
        numbers: Numbers of a tile, a power of two; at least a group, or a head vector without scales.
        num_warps: Warps of a program.
    """

    numbers: int
    num_warps: int


MOVES: Final = Tile(1024, 2)
"""Sixteen numbers for each thread, so that finding their places is a small part (decision 90)."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """What ``tuned`` chose. Launches that were prepared by another choice are not used."""

    table: Tuned
    moves: Tile


PINNED: Final = Tuning({}, MOVES)
_TUNING: ContextVar[Tuning] = ContextVar("kvloom_tuning", default=PINNED)

MAX_SPLIT_ROWS: Final = 64
"""Maximum rows of a tile of few new tokens; more query heads of a key/value head are several tiles."""


def config_for(case: Case) -> Config:
    """The tuned configuration within ``tuned``, or else the pinned one."""
    chosen = tuning().table.get(case)
    return pinned(case) if chosen is None else chosen


def pinned(case: Case) -> Config:
    """Fixed configuration of a case; those of 16-bit queries were measured (decision 58)."""
    is_wide, is_float32 = case.head_dim > 128, case.itemsize == 4
    if is_float32:  # no tensor cores: threads multiply, and registers are few
        return Config(16, 16, 4, 1, 4) if is_wide else Config(16 if case.is_split else 32, 32, 8, 1, 4)
    if case.is_split:
        rows = 16
        while rows < min(case.ratio, MAX_SPLIT_ROWS):
            rows *= 2
        if case.head_dim > 256:  # latents: sums of 64 rows need half of all registers
            if rows == 16:
                return Config(16, 32, 4, 3, 2)
            # Twice as many tokens fit beside DeepSeek's rope keys.
            has_room = rows == 64 and case.bits == 0 and case.rope_dim <= 64
            return Config(rows, 64 if has_room else 32, 8, 3, 1)
        if rows > 16 or is_wide or case.bits == 2:
            return Config(rows, 32 if is_wide else 64, 4, 2 if is_wide else 3, 4)
        # One warp waits for no other.
        if case.ratio > 8:
            return Config(16, 32, 1, 5 if case.bits else 3, 8)
        return Config(8, 32, 1, 5, 8 if case.bits or case.head_dim <= 64 else 6)
    if case.head_dim > 256:
        return Config(64, 32, 8, 3, 1)
    if is_wide or case.bits == 2:
        return Config(64, 32 if is_wide else 64, 8, 2, 2)
    return Config(128, 64, 8, 3, 1) if case.bits else Config(64, 64, 4, 3, 2)


def tile_of_moves() -> Tile:
    """Tile of ``store`` and ``load``: that of ``tuned``, or else the pinned one."""
    return tuning().moves


def tuning() -> Tuning:
    """That of ``tuned``, or else the one that has pinned configurations alone."""
    return _TUNING.get()


@contextmanager
def tuned(table: Tuned, moves: Tile = MOVES) -> Iterator[None]:
    """Context that uses ``table`` and ``moves``, and pinned configurations for cases that ``table`` lacks."""
    token = _TUNING.set(Tuning(table, moves))
    try:
        yield
    finally:
        _TUNING.reset(token)


def write_tuned(path: Path, device: str, table: Tuned) -> None:
    """Write configurations of the device of that name; the file keeps those of other devices."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[device] = [[*case, *config] for case, config in table.items()]
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def read_tuned(path: Path, device: str) -> dict[Case, Config]:
    """Configurations that ``write_tuned`` wrote for the device of that name; empty if there are none."""
    rows = json.loads(path.read_text(encoding="utf-8")).get(device, [])
    size = len(Case._fields)
    return {Case(*row[:size]): Config(*row[size:]) for row in rows}
