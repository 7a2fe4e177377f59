"""Format strings of keys and values, ``KIND[:gGROUP][,OPTION=VALUE...]``.

Examples: ``"float16"``, ``"int8"``, ``"int4:g32"``, ``"int4,rotate=keys"``. Kinds are the names in ``FLOATS``
and ``CODES``. The default group is ``group_for`` the head dim. Imports no torch, so that a command line can
be checked at once.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvloom.core.entries import CODES, FLOATS, RANGES, ROTATIONS, Codes, choice
from kvloom.errors import ArgumentError

STORAGE: Final = ("auto", *FLOATS, *CODES)
"""Names of kinds: the model's own dtype, a float dtype, or codes, which may have a group and options."""

SMOOTHED: Final = ("keys", "none")
"""Values of ``smooth``: the side that is smoothed before it is quantized."""

_SPELLING: Final = re.compile(r"([a-z0-9]+)(?::g([1-9][0-9]{0,17}))?((?:,[a-z]+=[a-z0-9]+)*)")


@dataclass(frozen=True, slots=True)
class Kind:
    """A parsed format string, such as ``"int8:g32,rotate=keys"``.

    Attributes:
        name: One of ``STORAGE``.
        group: Elements that share a scale; ``None`` if not given.
        rotate: One of ``ROTATIONS``.
        recent: Length of the residual window: last tokens that each token attends to unquantized; ``None`` if
            not given.
        smooth: One of ``SMOOTHED``: whether keys that are codes are smoothed, if the model has a smoothing.
        range: One of ``RANGES``; empty for kinds that have no choice.
    """

    name: str
    group: int | None = None
    rotate: str = "none"
    recent: int | None = None
    smooth: str = "keys"
    range: str = ""

    @property
    def codes(self) -> Codes | None:
        """Codes of this kind; ``None`` if it is not quantized."""
        return CODES.get(self.name)

    @property
    def bits(self) -> int:
        """Bits of a code; 0 if it is not quantized."""
        return self.codes.bits if self.codes else 0

    @property
    def usual(self) -> "Kind":
        """Kind with the same name and group, and default options."""
        if self.codes is None:
            return Kind(self.name, self.group, "none", 0)
        return Kind(self.name, self.group, self.codes.rotate, self.codes.recent, range=self.codes.range)

    def rotates(self, side: str) -> bool:
        """Whether ``"keys"`` or ``"values"`` are rotated."""
        return self.rotate in (side, "both")

    def __str__(self) -> str:
        """Shortest format string."""
        usual = self.usual
        group = "" if self.group is None else f":g{self.group}"
        rotate = "" if self.rotate == usual.rotate else f",rotate={self.rotate}"
        recent = "" if self.recent in (None, usual.recent) else f",recent={self.recent}"
        smooth = "" if self.smooth == usual.smooth else f",smooth={self.smooth}"
        range = "" if self.range == usual.range else f",range={self.range}"
        return f"{self.name}{group}{rotate}{range}{recent}{smooth}"


def _one_of(*words: str) -> tuple[str, Callable[[str], str | None]]:
    """Allowed values of an option, in words, and a parser that returns ``None`` for others."""
    return f"one of {', '.join(words)}", lambda text: text if text in words else None


def _count(low: int = 0) -> tuple[str, Callable[[str], int | None]]:
    """Description and parser, as of ``_one_of``, for a number of at least ``low``."""

    def read(text: str) -> int | None:
        is_number = text.isascii() and text.isdigit() and len(text) <= 18 and str(int(text)) == text
        return int(text) if is_number and int(text) >= low else None

    return f"a number of at least {low}", read


_OPTIONS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "rotate": _one_of(*ROTATIONS),
    "recent": _count(),
    "smooth": _one_of(*SMOOTHED),
    "range": _one_of(*RANGES),
}
"""Options of codes, by name, each a field of ``Kind``."""


def recent_of(keys: Kind, values: Kind) -> int:
    """Residual window of a layer with these kinds of keys and values."""
    said = [kind.recent for kind in (keys, values) if kind.recent is not None]
    return max(said or [kind.usual.recent or 0 for kind in (keys, values)])


def is_plan(kv: object) -> bool:
    """Whether ``kv`` is the file of a plan with kinds for each layer: a path, or a name in .json."""
    return isinstance(kv, Path) or (isinstance(kv, str) and kv.endswith(".json"))


def expect_kv(name: str, text: str) -> None:
    """Raise ArgumentError unless ``text`` is the file of a plan or a format string."""
    if not is_plan(text):
        parse_kind(name, text)


def parse_kind(name: str, text: object, kinds: tuple[str, ...] = STORAGE) -> Kind:
    """Parse a format string.

    Args:
        name: The caller's argument, for the error.
        text: One of ``kinds``; codes may have a group after it, of at least 1 without leading zeros, and then
            options, each at most once.
        kinds: Allowed kinds.

    Raises:
        ArgumentError: ``text`` is no such format string, a group of codes is no whole bytes, or codes have
            no choice of their range.
    """
    found = _SPELLING.fullmatch(text) if isinstance(text, str) else None
    kind, digits, options = found.groups() if found else ("", None, "")
    codes = CODES.get(kind)
    if kind not in kinds or ((digits or options) and codes is None):
        raise ArgumentError(
            f"{name} must be one of {choice(kinds)}, codes also with a group such as int8:g32 or an option "
            f"such as int4,rotate=keys, got {text!r}"
        )
    if codes is None:
        return Kind(kind)
    group = int(digits) if digits else None
    if group is not None and group % codes.per_byte:
        raise ArgumentError(
            f"{name} must have a group of a multiple of {codes.per_byte} for {codes.bits} bits, got {text!r}"
        )
    said = _parse_options(name, text, options)
    if "range" in said and not codes.range:
        raise ArgumentError(f"{name} must have no range for {codes.bits} bits, got {text!r}")
    return Kind(kind, group, **{"rotate": codes.rotate, "range": codes.range} | said)


def _parse_options(name: str, text: object, options: str) -> dict[str, Any]:
    """Parse options such as ``",rotate=keys"``."""
    values: dict[str, Any] = {}
    for option in options.split(",")[1:]:
        key, _, word = option.partition("=")
        if key not in _OPTIONS or key in values:
            raise ArgumentError(
                f"{name} must have no options but {', '.join(_OPTIONS)}, each once, got {text!r}"
            )
        what, read = _OPTIONS[key]
        values[key] = read(word)
        if values[key] is None:
            raise ArgumentError(f"{name} must have as {key} {what}, got {text!r}")
    return values


PACKS: Final[dict[str, bool | str]] = {"no": False, "both": True, "only": "only"}
"""Values of ``pack`` by name on command lines: keep no packed weights, both, or packed ones only."""


def expect_pack(pack: object) -> None:
    """Raise ArgumentError unless ``pack`` is a value of ``PACKS``."""
    if not isinstance(pack, (bool, str)) or pack not in PACKS.values():
        raise ArgumentError(f"pack must be False, True or 'only', got {pack!r}")
