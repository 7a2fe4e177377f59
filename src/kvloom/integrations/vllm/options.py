"""Options of an engine in ``--additional-config '{"kvloom": {...}}'``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from kvloom.core.entries import OF_BITS
from kvloom.core.specs import QuantSpec
from kvloom.core.spelling import SMOOTHED, Kind
from kvloom.errors import ConfigError

CODES: Final = {"int8_per_token_head": 8, "int4_per_token_head": 4}
"""Bits of the codes in kvloom's pages, by the value of ``--kv-cache-dtype``."""


@dataclass(frozen=True, slots=True)
class Options:
    """kvloom's options of an engine.

    Attributes:
        group: Elements of a head vector that share a scale in quantized pages. ``None``: the greatest common
            divisor of 64 and the head dim, which must be a multiple of 8.
        float: Whether float pages are kvloom's, too: ``True``, ``False``, or ``"auto"`` if a probe at start
            finds them faster.
        recent: Residual window of quantized pages: the last tokens that each token attends to unquantized.
            ``None``: 64 for int4, 0 for int8.
        smooth: Whether keys in quantized pages are smoothed, one of ``SMOOTHED``.
    """

    group: int | None = None
    float: bool | str = False
    recent: int | None = None
    smooth: str = "keys"

    def __post_init__(self) -> None:
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise ConfigError(f"kvloom.group must be a positive int, got {self.group!r}")
        if type(self.float) is not bool and self.float != "auto":
            raise ConfigError(f"kvloom.float must be true, false or 'auto', got {self.float!r}")
        if self.recent is not None and (type(self.recent) is not int or not 0 <= self.recent < 2**31):
            raise ConfigError(f"kvloom.recent must be an int of at least 0, got {self.recent!r}")
        if self.smooth not in SMOOTHED:
            raise ConfigError(f"kvloom.smooth must be one of {', '.join(SMOOTHED)}, got {self.smooth!r}")

    @classmethod
    def of(cls, additional_config: object) -> "Options":
        """The options of an engine.

        Args:
            additional_config: The engine's ``additional_config``.

        Raises:
            ConfigError: ``kvloom`` in it is no mapping, or has an unknown name or an invalid value.
        """
        given: Any = additional_config.get("kvloom", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"kvloom must be a mapping of options, got {given!r}")
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError(f"kvloom must have options {', '.join(names)} only, got {name!r}")
        return cls(**given)

    def kind(self, bits: int, head_dim: int) -> Kind:
        """Kind of a layer's pages, as in the format string of a ``KVPool`` with the same pages.

        Keys are rotated as ``Codes.rotate`` says.

        Raises:
            ConfigError: as ``quant``.
        """
        codes = OF_BITS[bits]
        recent = codes.recent if self.recent is None else self.recent
        quant = self.quant(bits, head_dim)
        return Kind(codes.name, quant.group, codes.rotate, recent, smooth=self.smooth, range=quant.range)

    def quant(self, bits: int, head_dim: int) -> QuantSpec:
        """Quantization of a layer, with the range of its format string, without rotation and smoothing.

        Raises:
            ConfigError: the group does not divide ``head_dim``, or is odd although two codes share a byte.
        """
        if self.group is not None and head_dim % self.group:
            raise ConfigError(f"kvloom.group must divide the head dim {head_dim}, got {self.group}")
        full_range = OF_BITS[bits].range == "full"
        return QuantSpec(bits, self.group, full_range=full_range).for_head_dim(head_dim)
