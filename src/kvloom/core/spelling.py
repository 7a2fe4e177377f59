"""How keys and values are kept, spelled ``KIND[:gGROUP]`` such as ``"float16"``, ``"int8"``, ``"int4:g32"``.

Without torch, so that a command line can be checked at once.
"""

import re
from typing import Final

from kvloom.errors import ArgumentError

STORAGE: Final = ("auto", "float32", "float16", "bfloat16", "int8", "int4")
"""Kinds: the model's own dtype, a float dtype, or codes."""
CODE_BITS: Final = {"int8": 8, "int4": 4}
"""Bits of the kinds that are codes; they may have a group."""
GROUP: Final = 64
"""Elements along the head dim that share a scale, if no group is given."""

_SPELLING: Final = re.compile(r"([a-z0-9]+)(?::g([1-9][0-9]{0,17}))?")


def parse_kind(name: str, text: object, kinds: tuple[str, ...] = STORAGE) -> tuple[str, int]:
    """Kind and group that ``text`` spells.

    Args:
        name: The caller's argument, for the error.
        text: One of ``kinds``; codes may have a group behind it, of at least 1 and without zeros in front.
        kinds: Those that are allowed.

    Returns:
        The kind, and its group; 0 for a kind that is no codes.

    Raises:
        ArgumentError: ``text`` is no such spelling, or 4-bit codes have an odd group.
    """
    found = _SPELLING.fullmatch(text) if isinstance(text, str) else None
    kind, digits = found.groups() if found else ("", None)
    if kind not in kinds or (digits is not None and kind not in CODE_BITS):
        raise ArgumentError(
            f"{name} must be one of {', '.join(kinds[:-1])} or {kinds[-1]}, codes also with a group such as "
            f"int8:g32, got {text!r}"
        )
    if kind not in CODE_BITS:
        return kind, 0
    group = int(digits or GROUP)
    if CODE_BITS[kind] == 4 and group % 2:
        raise ArgumentError(f"{name} must have an even group for 4 bits, got {text!r}")
    return kind, group
