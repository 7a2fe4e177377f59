"""How long campaigns are: random walks, hostile calls, damaged files, kills of a process.

``pytest --campaign 40`` makes each of them 40 times as long, and has whole products of parameters where pairs
of them are tested otherwise: ``--campaign 1`` has the products alone. A test whose length follows has the
marker ``campaign``.
"""

from __future__ import annotations

import argparse

given: int | None = None
"""What ``--campaign`` says; None without it."""


def parsed(text: str) -> int:
    """The value of ``--campaign``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def times(num: int) -> int:
    """``num``, the length without the option, as many times as the option says."""
    return num * (given or 1)


def is_whole() -> bool:
    """Whether products of parameters are whole."""
    return given is not None
