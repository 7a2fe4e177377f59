"""Statistics of the keys of real models, and their names on command lines. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Final

from kvloom.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """Outliers and biases in the keys of each head.

    Attributes:
        outliers: Number of RoPE pairs whose keys are ``scale`` times as large, and queries as much smaller.
        biases: RoPE pairs that have a bias before RoPE, by their place among all pairs of a head: 0 for the
            highest frequency, up to but without 1 for the lowest.
        scale: Factor of the outliers.
        sigmas: Norm of each bias in standard deviations of the keys of its head; queries of the pair are
            divided by it.
    """

    outliers: int = 0
    biases: tuple[float, ...] = ()
    scale: float = 20.0
    sigmas: float = 100.0


_LOW, _MIDDLE, _HIGH = 31 / 32, 16 / 32, 4 / 32
_MANY: Final = (_HIGH, 8 / 32, _MIDDLE, 24 / 32, _LOW)
STATISTICS: Final = {
    "plain": KeyStatistics(),
    "outliers": KeyStatistics(outliers=2),
    "biases": KeyStatistics(biases=_MANY),
    "biases-low": KeyStatistics(biases=(_LOW,)),
    "biases-middle": KeyStatistics(biases=(_MIDDLE,)),
    "biases-high": KeyStatistics(biases=(_HIGH,)),
    "both": KeyStatistics(outliers=2, biases=(_HIGH, _MIDDLE, _LOW)),
}
"""Statistics by name; low, middle and high are RoPE frequencies: of 32 pairs the last, 16th and 4th."""


def parse_statistics(name: str, text: str) -> KeyStatistics:
    """Parse statistics: a name, and optionally ``:N`` for biases of N standard deviations.

    Args:
        name: Name of ``text`` in errors.
        text: Such as ``"biases:30"``.

    Raises:
        ArgumentError: there are none of that name, or N is not a number from 1 to 10,000.
    """
    kind, has_sigmas, sigmas = text.partition(":")
    found = STATISTICS.get(kind)
    if found is None:
        raise ArgumentError(f"{name} must be one of {', '.join(STATISTICS)}, got {text!r:.60}")
    if not has_sigmas:
        return found
    if not found.biases:
        raise ArgumentError(
            f"{name} must be without standard deviations unless it has biases, got {text!r:.60}"
        )
    if not (sigmas.isascii() and sigmas.isdecimal() and len(sigmas) < 6 and 1 <= int(sigmas) <= 10_000):
        raise ArgumentError(f"{name} must have 1 to 10000 standard deviations, got {text!r:.60}")
    return replace(found, sigmas=float(sigmas))
