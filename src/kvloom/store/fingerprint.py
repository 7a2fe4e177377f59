"""Fingerprints of stored bytes: the model that computed them, and their format. Imports no torch."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final

from kvloom.core.entries import ROTATIONS, Entry, SideFormat
from kvloom.errors import ConfigError, UnsupportedError

__all__ = ["Fingerprint", "LayerFormat", "SideFormat", "rotation_in"]

_TEXTS: Final = ("config", "weights", "dtype", "rope", "attention", "rotation", "behavior", "smoothing")
_LATER: Final = ("behavior", "recent", "smoothing")
LayerFormat = Entry
"""How a layer keeps its tokens."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The identity of keys and values: model and format. Pages of another fingerprint are never used.

    Attributes:
        config: Digest of the model's configuration.
        weights: Digest of the model's weights.
        dtype: That the model computes in.
        rope: How positions are encoded, as the configuration says it.
        attention: Which tokens a token sees: ``"full"``.
        rotation: One of ``ROTATIONS``.
        layers: What each layer keeps of a token. Where none says that it is rotated, ``rotation`` does.
        behavior: Digest of what the model's modules do with its weights: classes, attributes, hooks. Empty
            where nothing says it, as in files before it was there.
        recent: Residual window: to how many of the newest tokens each token attends unquantized.
        smoothing: Digest of how keys were smoothed before they became codes. Empty where they were not.

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
        """All fields as JSON of one form; layers that are alike one after the other are counted."""
        runs: list[list[Any]] = []
        for layer in self.layers:
            if runs and runs[-1][1] == layer:
                runs[-1][0] += 1
            else:
                runs.append([1, layer])
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _LATER:  # which earlier files do not have
            if not named[name]:
                del named[name]
        named["layers"] = [[count, _saved(layer)] for count, layer in runs]
        return json.dumps(named, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, max_layers: int = 10_000) -> "Fingerprint":
        """The fingerprint that ``to_json`` wrote.

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
            raise ConfigError(f"text must be a fingerprint: {error}") from None
        if found.to_json() != text:
            raise ConfigError("text must be a fingerprint as to_json writes it, got it written otherwise")
        return found

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, of every field."""
        return hashlib.sha256(b"kvloom fingerprint\0" + self.to_json().encode()).digest()

    @property
    def folder(self) -> str:
        """The folder of its runs in a store."""
        return self.digest.hex()[:16]

    def difference(self, other: "Fingerprint") -> str:
        """The first field in which another differs, as a sentence; empty if none does."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {_short(theirs)}, not {_short(mine)}"
        return ""


def rotation_in(layers: Iterable[Entry]) -> str:
    """Which of keys and values are rotated in every layer that has codes of them, one of ``ROTATIONS``.

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
    """Its fields as files have them, in which ``Fingerprint.rotation`` says what is rotated."""
    saved = asdict(layer)
    for side in filter(None, (saved["key"], saved["value"])):
        del side["rotated"]
        if not side["full_range"]:  # as earlier files have it
            del side["full_range"]
    return saved


def _layer(saved: dict[str, Any]) -> Entry:
    sides = {name: saved[name] and SideFormat(**saved[name]) for name in ("key", "value")}
    return Entry(**{**saved, **sides})


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
