"""What stored bytes mean: the model that computed them, and how they are kept. Imports no torch."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final

from kvloom.errors import ConfigError

ROTATIONS: Final = ("none", "keys", "values", "both")
"""Which of keys and values that are codes are rotated before they are quantized."""
_TEXTS: Final = ("config", "weights", "dtype", "rope", "attention", "rotation", "behavior")
_DTYPES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_CODES: Final = {8: "int8", 4: "uint8", 2: "bits2x4"}


@dataclass(frozen=True, slots=True)
class SideFormat:
    """Keys or values of one layer.

    Attributes:
        head_dim: Elements of a head vector.
        dtype: Of vectors that are not quantized: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        bits: Of a code; 0 if not quantized.
        group: Elements that share a scale; 0 if not quantized.
        scale_dtype: Of the scales; empty if not quantized.

    Raises:
        ConfigError: a field is no such value, or does not fit the others.
    """

    head_dim: int
    dtype: str
    bits: int = 0
    group: int = 0
    scale_dtype: str = ""

    def __post_init__(self) -> None:
        _expect_count("head_dim", self.head_dim)
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {tuple(_DTYPES)}, got {self.dtype!r}")
        if type(self.bits) is not int or self.bits not in (0, *_CODES):
            raise ConfigError(f"bits must be 0, 8, 4 or 2, got {self.bits!r}")
        if not self.bits:
            if (self.group, self.scale_dtype) != (0, ""):
                raise ConfigError(f"group must be 0 without codes, got {self.group!r} {self.scale_dtype!r}")
            return
        _expect_count("group", self.group)
        if self.head_dim % self.group or self.group * self.bits % 8:
            raise ConfigError(f"group must divide head_dim {self.head_dim} in bytes, got {self.group}")
        if self.scale_dtype not in _DTYPES:
            raise ConfigError(f"scale_dtype must be one of {tuple(_DTYPES)}, got {self.scale_dtype!r}")

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """Of codes and then scales, or of vectors: dtype, bytes of an element, elements of a head vector."""
        if not self.bits:
            return [(self.dtype, _DTYPES[self.dtype], self.head_dim)]
        codes = (_CODES[self.bits], 1, self.head_dim * self.bits // 8)
        return [codes, (self.scale_dtype, _DTYPES[self.scale_dtype], self.head_dim // self.group)]


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """Keys and values of one layer.

    Attributes:
        heads: Key/value heads.
        key: How the keys are kept.
        value: How the values are kept.
    """

    heads: int
    key: SideFormat
    value: SideFormat

    def __post_init__(self) -> None:
        _expect_count("heads", self.heads)


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Whose keys and values these are. Pages of another fingerprint are never used.

    Attributes:
        config: Digest of the model's configuration.
        weights: Digest of the model's weights.
        dtype: That the model computes in.
        rope: How positions are encoded, as the configuration says it.
        attention: Which tokens a token sees: ``"full"``.
        rotation: One of ``ROTATIONS``.
        layers: How each layer keeps its tokens.
        behavior: Digest of what the model's modules do with its weights: classes, attributes, hooks. Empty
            where nothing says it, as in files before it was there.
        recent: Residual window: to how many of the newest tokens each token attends unquantized.

    Raises:
        ConfigError: a field is missing or no such value.
    """

    config: str
    weights: str
    dtype: str
    rope: str
    attention: str
    rotation: str
    layers: tuple[LayerFormat, ...]
    behavior: str = ""
    recent: int = 0

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) or not (value or name == "behavior"):
                raise ConfigError(f"{name} must be a text that is not empty, got {value!r}")
        if type(self.recent) is not int or not 0 <= self.recent < 2**31:
            raise ConfigError(f"recent must be an int of at least 0, got {self.recent!r}")
        if self.rotation not in ROTATIONS:
            raise ConfigError(f"rotation must be one of {ROTATIONS}, got {self.rotation!r}")
        if not self.layers:
            raise ConfigError("layers must hold at least one layer, got none")

    def __eq__(self, other: object) -> bool:
        """Whether every field is the same, by the digest of all."""
        return self.digest == other.digest if isinstance(other, Fingerprint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def num_heads(self) -> int:
        """Heads that can be read one by one: those of every layer, or 1 if layers differ in heads."""
        heads = {layer.heads for layer in self.layers}
        return heads.pop() if len(heads) == 1 else 1

    def to_json(self) -> str:
        """One spelling of every field; layers that are alike one behind the other are counted."""
        runs: list[list[Any]] = []
        for layer in self.layers:
            if runs and runs[-1][1] == layer:
                runs[-1][0] += 1
            else:
                runs.append([1, layer])
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("behavior", "recent"):  # which earlier files do not have
            if not named[name]:
                del named[name]
        named["layers"] = [[count, asdict(layer)] for count, layer in runs]
        return json.dumps(named, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, max_layers: int = 10_000) -> "Fingerprint":
        """What ``to_json`` spelled.

        Raises:
            ConfigError: ``text`` is something else, or has more layers than ``max_layers``.
        """
        try:
            named = json.loads(text)
            runs = named.pop("layers")
            counts = [count for count, _ in runs]
            if any(type(count) is not int or count < 1 for count in counts) or sum(counts) > max_layers:
                raise ConfigError(f"layers must be counted from 1 to {max_layers} in all, got {counts[:9]}")
            layers = [layer for count, saved in runs for layer in [_layer(saved)] * count]
            found = cls(**named, layers=tuple(layers))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"text must spell a fingerprint: {error}") from None
        if found.to_json() != text:
            raise ConfigError("text must spell a fingerprint as to_json does, got another spelling")
        return found

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, of every field."""
        return hashlib.sha256(b"kvloom fingerprint\0" + self.to_json().encode()).digest()

    @property
    def folder(self) -> str:
        """Of its runs in a store."""
        return self.digest.hex()[:16]

    def difference(self, other: "Fingerprint") -> str:
        """The first field in which another differs, as a sentence; empty if none does."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {_short(theirs)}, not {_short(mine)}"
        return ""


def _layer(saved: dict[str, Any]) -> LayerFormat:
    return LayerFormat(**{**saved, **{side: SideFormat(**saved[side]) for side in ("key", "value")}})


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _expect_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ConfigError(f"{name} must be a positive int, got {value!r}")
