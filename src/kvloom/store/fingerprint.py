"""Identity of stored bytes: fingerprints of model and format, and probes of results. Imports no torch."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any, Final, NamedTuple

from kvloom.core.entries import ROTATIONS, Entry, SideFormat
from kvloom.errors import ConfigError, UnsupportedError

__all__ = ["Fingerprint", "LayerFormat", "Probe", "SideFormat", "rotation_in"]

_LATER: Final = ("behavior", "recent", "smoothing", "context")
_TEXTS: Final = (
    "config",
    "weights",
    "dtype",
    "rope",
    "attention",
    "rotation",
    "behavior",
    "smoothing",
    "context",
)
LayerFormat = Entry
"""Format of a layer's tokens."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The identity of keys and values: model and format. Pages of another fingerprint are never used.

    Attributes:
        config: Digest of the model's configuration.
        weights: Digest of the model's weights.
        dtype: Dtype that the model computes in.
        rope: Encoding of positions, as in the configuration.
        attention: Tokens that a token sees: ``"full"``.
        rotation: One of ``ROTATIONS``.
        layers: Entry of a token in each layer. If none is rotated, ``rotation`` applies.
        behavior: Digest of the model's modules apart from weights: classes, attributes, hooks. Empty if
            unknown, as in earlier files.
        recent: Length of the residual window: last tokens that each token attends to unquantized.
        smoothing: Digest of the smoothing of keys; empty if they are not smoothed.
        context: Settings of the library that computes which differ from its defaults, such as autocast.

    Raises:
        ConfigError: a field is missing or no such value.
    """

    config: str
    weights: str
    dtype: str
    rope: str
    attention: str
    rotation: str
    layers: tuple[Entry, ...]
    behavior: str = ""
    recent: int = 0
    smoothing: str = ""
    context: str = ""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) or not (value or name in _LATER):
                raise ConfigError(f"{name} must be a text that is not empty, got {value!r}")
        if type(self.recent) is not int or not 0 <= self.recent < 2**31:
            raise ConfigError(f"recent must be an int of at least 0, got {self.recent!r}")
        if self.rotation not in ROTATIONS:
            raise ConfigError(f"rotation must be one of {ROTATIONS}, got {self.rotation!r}")
        if not self.layers:
            raise ConfigError("layers must hold at least one layer, got none")
        rotation = rotation_in(self.layers)
        if rotation not in ("none", self.rotation):
            raise ConfigError(f"rotation must be that of the layers, {rotation!r}, got {self.rotation!r}")
        if rotation != self.rotation:
            layers = tuple(layer.rotated_as(self.rotation) for layer in self.layers)
            object.__setattr__(self, "layers", layers)

    def __eq__(self, other: object) -> bool:
        """Whether every field is equal, by digest."""
        return self.digest == other.digest if isinstance(other, Fingerprint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def num_heads(self) -> int:
        """Number of heads that can be read one by one: that of every layer, or 1 if layers differ."""
        heads = {layer.heads for layer in self.layers}
        return heads.pop() if len(heads) == 1 else 1

    def to_json(self) -> str:
        """All fields as canonical JSON, in which consecutive equal layers are counted."""
        return self._json

    @cached_property
    def _json(self) -> str:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _LATER:  # fields that earlier files do not have
            if not named[name]:
                del named[name]
        named["layers"] = [[len([*same]), _saved(layer)] for layer, same in groupby(self.layers)]
        return json.dumps(named, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, max_layers: int = 10_000) -> "Fingerprint":
        """Fingerprint from the JSON of ``to_json``.

        Raises:
            ConfigError: ``text`` is something else, or has more layers than ``max_layers``.
        """
        try:
            named = json.loads(text)
            runs = named.pop("layers")
            counts = [count for count, _ in runs]
            if any(type(count) is not int or count < 1 for count in counts) or sum(counts) > max_layers:
                raise ConfigError(f"layers must be 1 to {max_layers} in total, got the counts {counts[:9]}")
            layers = [layer for count, saved in runs for layer in [_layer(saved)] * count]
            found = cls(**named, layers=tuple(layers))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"text must be a fingerprint: {error}") from None
        if found.to_json() != text:
            raise ConfigError("text must be a fingerprint as to_json writes it, got it written otherwise")
        return found

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all fields, 32 bytes."""
        return hashlib.sha256(b"kvloom fingerprint\0" + self.to_json().encode()).digest()

    @property
    def folder(self) -> str:
        """Folder of its runs in a store."""
        return self.digest.hex()[:16]

    def difference(self, other: "Fingerprint") -> str:
        """Sentence about the first field that differs; empty if none does."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {_short(theirs)}, not {_short(mine)}"
        return ""


class Probe(NamedTuple):
    """Keys and values of a few fixed tokens, in any form.

    A fingerprint compares descriptions of models. A probe compares results, so it finds differences that a
    fingerprint misses before anything is read.

    Attributes:
        data: Bytes to store.
        difference: Function that describes how the ``data`` of another probe differ by more than rounding;
            empty if they do not.
    """

    data: bytes
    difference: Callable[[bytes], str]


def rotation_in(layers: Iterable[Entry]) -> str:
    """Rotation of all layers that have codes, one of ``ROTATIONS``.

    Raises:
        UnsupportedError: layers differ.
    """
    rotated: dict[str, set[bool]] = {"keys": set(), "values": set()}
    for layer in layers:
        for name, side in zip(rotated, layer.sides, strict=False):
            rotated[name] |= {side.rotated} if side.bits else set()
    for name, found in rotated.items():
        if len(found) > 1:
            raise UnsupportedError(f"{name} must be rotated in every layer or in none to be stored, got both")
    keys, values = (found == {True} for found in rotated.values())
    return ROTATIONS[keys + 2 * values]


def _saved(layer: Entry) -> dict[str, Any]:
    """Fields as in files, where ``Fingerprint.rotation`` has the rotation."""
    saved = asdict(layer)
    for side in filter(None, (saved["key"], saved["value"])):
        del side["rotated"]
        if not side["full_range"]:  # as in earlier files
            del side["full_range"]
    return saved


def _layer(saved: dict[str, Any]) -> Entry:
    sides = {name: saved[name] and SideFormat(**saved[name]) for name in ("key", "value")}
    return Entry(**{**saved, **sides})


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
