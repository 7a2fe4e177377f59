"""Checks of numbers, sizes and files that need no torch."""

import argparse
import re
from pathlib import Path
from typing import Final

from kvloom.errors import ArgumentError


def expect_least(name: str, value: float, least: float) -> None:
    """Raise ArgumentError unless a number is at least ``least``; a NaN is not."""
    if not value >= least:
        raise ArgumentError(f"{name} must be at least {least:,}, got {value!r}")


def expect_within(name: str, value: float, low: float, high: float) -> None:
    """Raise ArgumentError unless a number is from ``low`` to ``high``; a NaN is not."""
    if not low <= value <= high:
        raise ArgumentError(f"{name} must be from {low:,} to {high:,}, got {value}")


def expect_options(args: argparse.Namespace, least: float, *names: str) -> None:
    """``expect_least`` of the options with these names that were given, each with the name of its option."""
    for name in names:
        if (value := getattr(args, name)) is not None:
            expect_least(f"--{name.replace('_', '-')}", value, least)


def parse_bytes(name: str, text: str) -> int:
    """Parse a size: ``"24GB"`` (10^9), ``"1.5GiB"`` (2^30) or a plain number of bytes.

    Raises:
        ArgumentError: ``text`` is no size; the error calls it ``name``.
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]i?B)?", text)
    if found is None:
        raise ArgumentError(f"{name} must be a number of bytes such as 24GB or 24GiB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2] or ""])


_UNITS: Final = {"": 1} | {
    f"{letter}{i}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for i, base in (("", 1000), ("i", 1024))
}
"""Bytes of each unit of a size."""


def read_text(name: str, path: Path) -> str:
    """The text of a file; raises ArgumentError, with the name of the argument, if it is none in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{name} must be text in UTF-8: {error}") from error
