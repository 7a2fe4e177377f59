"""A cache on its way between engines: what each layer holds, in one convention, read when it is asked for.

Shapes: T tokens, H key/value heads, D elements of a head vector.

The convention is that of transformers and ``KVCache``: keys after RoPE, whose pairs are elements i and
i + D/2; values as projected; of latent attention the latent as keys and the rope key as values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from kvloom.carry.rope_pairs import to_halves
from kvloom.core.entries import FLOATS
from kvloom.core.pairs import are_finite
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError
from kvloom.quant.rotation import rotate


@dataclass(frozen=True, slots=True, eq=False)
class Int8Codes:
    """Head vectors as int8 codes with a scale for each group of elements, and without offsets.

    Attributes:
        codes: ``[T, H, D]`` int8.
        scales: ``[T, H, D / group]`` float16.
        rotated: Elements that a Hadamard matrix rotated together before they were quantized; 0 for none.
    """

    codes: Tensor
    scales: Tensor
    rotated: int = 0

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.codes.shape[-1] // self.scales.shape[-1]

    def floats(self) -> Tensor:
        """The vectors ``[T, H, D]`` float32, rotated back."""
        groups = self.codes.float().unflatten(-1, (-1, self.group))
        x = (groups * self.scales.float()[..., None]).flatten(-2)
        return rotate(x, self.rotated) if self.rotated else x


@dataclass(frozen=True, slots=True, eq=False)
class AffineCodes:
    """Head vectors as unsigned codes with a scale and an offset for each group of elements, as MLX has them.

    Attributes:
        words: ``[T, H, D * bits / 32]`` int32, whose bits are codes, the first in the lowest.
        scales: ``[T, H, D / group]``, float32, float16 or bfloat16.
        biases: The same of the offsets.
        bits: Bits of a code: 8, 4 or 2.
    """

    words: Tensor
    scales: Tensor
    biases: Tensor
    bits: int

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.words.shape[-1] * 32 // self.bits // self.scales.shape[-1]

    def floats(self) -> Tensor:
        """The vectors ``[T, H, D]`` float32: code times scale plus offset."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        codes = (self.words[..., None] >> shifts) & ((1 << self.bits) - 1)
        groups = codes.flatten(-2).float().unflatten(-1, (-1, self.group))
        x: Tensor = (groups * self.scales.float()[..., None] + self.biases.float()[..., None]).flatten(-2)
        return x


Vectors: TypeAlias = Tensor | Int8Codes | AffineCodes
"""Head vectors ``[T, H, D]``: floats of one of ``FLOATS``, or codes."""


ALL: Final = slice(0, None)
"""All tokens of a side."""
_PART: Final = 1 << 21
"""Elements that are read at a time, so that they stay in the processor's cache until they are written."""


class Load(Protocol):
    """A function that reads the vectors of a range of tokens of a side, of all if none is given."""

    def __call__(self, tokens: slice = ALL, /) -> Vectors: ...


class LoadFloats(Protocol):
    """A ``Load`` of floats."""

    def __call__(self, tokens: slice = ALL, /) -> Tensor: ...


def part_of(places: slice | Tensor, tokens: slice) -> slice | Tensor:
    """Places of some tokens, given those of all."""
    if isinstance(places, Tensor):
        return places[tokens]
    found = range(places.start, places.stop)[tokens]
    return slice(found.start, found.stop)


def _rows(x: Tensor, tokens: slice = ALL) -> Tensor:
    return x[tokens]


def _in_halves(load: LoadFloats, rotary: int, tokens: slice = ALL) -> Tensor:
    return to_halves(load(tokens), rotary)


def floats_of(vectors: Vectors) -> Tensor:
    """The vectors as floats; those of codes are float32."""
    return vectors if isinstance(vectors, Tensor) else vectors.floats()


@dataclass(frozen=True)
class CarriedSide:
    """Keys or values of one layer.

    Attributes:
        num_tokens: T.
        heads: H.
        head_dim: D.
        kind: One of ``FLOATS``, or a name of codes, such as ``"q8_0"``.
        load: Function that reads the vectors.
        rounded_to: Kind that they were rounded to before, if it is coarser than ``kind``.
        is_whole: Whether ``load`` reads all tokens to return some.
        adjacent: Function that reads floats as the source has them, if their pairs are adjacent.
        rotary: Elements whose pairs it has adjacent, the first of a vector.
    """

    num_tokens: int
    heads: int
    head_dim: int
    kind: str
    load: Load
    rounded_to: str = ""
    is_whole: bool = False
    adjacent: LoadFloats | None = None
    rotary: int = 0

    @classmethod
    def of_adjacent(
        cls, num_tokens: int, heads: int, head_dim: int, kind: str, load: LoadFloats, rotary: int
    ) -> "CarriedSide":
        """A side of floats whose source has the pairs of ``rotary`` elements adjacent; 0 of none."""
        if not rotary:
            return cls(num_tokens, heads, head_dim, kind, load)
        halves = partial(_in_halves, load, rotary)
        return cls(num_tokens, heads, head_dim, kind, halves, adjacent=load, rotary=rotary)

    @classmethod
    def of(cls, x: Tensor, rotary: int = 0) -> "CarriedSide":
        """A side of floats ``[T, H, D]`` that are in memory; ``rotary`` as of ``of_adjacent``."""
        num_tokens, heads, head_dim = x.shape
        return cls.of_adjacent(num_tokens, heads, head_dim, dtype_name(x.dtype), partial(_rows, x), rotary)

    def parts(self) -> Iterator[slice]:
        """Ranges of tokens whose vectors stay in the processor's cache."""
        count = self.num_tokens if self.is_whole else max(_PART // (self.heads * self.head_dim), 1)
        for first in range(0, self.num_tokens, count):
            yield slice(first, min(first + count, self.num_tokens))

    @property
    def has_codes(self) -> bool:
        """Whether the vectors are codes."""
        return self.kind not in FLOATS


@dataclass(frozen=True)
class CarriedLayer:
    """What one layer holds: of all tokens, or of the last ones if it has a window.

    Attributes:
        keys: Keys, or latents.
        values: Values, or rope keys beside latents.
        window: Tokens that a token sees, itself included; ``None`` for all before it.
        has_latents: Whether keys are latents.
    """

    keys: CarriedSide
    values: CarriedSide
    window: int | None = None
    has_latents: bool = False

    @property
    def sides(self) -> tuple[tuple[str, CarriedSide], ...]:
        """Both sides by name."""
        return ("keys", self.keys), ("values", self.values)


@dataclass(frozen=True)
class CarriedCache:
    """Keys and values of one sequence whose first token has position 0.

    Attributes:
        layers: What each layer holds.
        num_tokens: Tokens of the sequence.
        tokens: Their ids; ``None`` if unknown.
        said: What the source says of itself, such as metadata of a file.

    Raises:
        ArgumentError: there is no layer or no token, or layers hold another number of tokens.
    """

    layers: tuple[CarriedLayer, ...]
    num_tokens: int
    tokens: tuple[int, ...] | None = None
    said: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or self.num_tokens < 1:
            raise ArgumentError(
                f"cache must have layers and tokens, got {len(self.layers)} and {self.num_tokens}"
            )
        if self.tokens is not None and len(self.tokens) != self.num_tokens:
            raise ArgumentError(f"tokens must be the {self.num_tokens} of the cache, got {len(self.tokens)}")
        for i, layer in enumerate(self.layers):
            wanted = num_held(self.num_tokens, layer.window)
            held = {side.num_tokens for _, side in layer.sides}
            if held != {wanted}:
                raise ArgumentError(
                    f"cache must have {wanted} of {self.num_tokens} tokens in layer {i}, got {sorted(held)}"
                )

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Distinct kinds of all sides."""
        return tuple(dict.fromkeys(side.kind for layer in self.layers for _, side in layer.sides))


def own_tokens(own: Sequence[int], given: Sequence[int] | None) -> tuple[int, ...]:
    """Ids of the tokens that a source has; raises ArgumentError if the caller gave others."""
    if given is not None and [*given] != [*own]:
        raise ArgumentError("tokens must be those of the source, got others")
    return tuple(own)


def num_held(num_tokens: int, window: int | None) -> int:
    """Tokens that a layer holds for the next one to see."""
    return num_tokens if window is None else min(num_tokens, window - 1)


def expect_finite(name: str, layer: int, vectors: Vectors) -> None:
    """Raise ArgumentError if vectors of a side have a NaN or an infinity.

    Args:
        name: ``"keys"`` or ``"values"``.
        layer: Number of the layer.
        vectors: The vectors.
    """
    if isinstance(vectors, Tensor):
        parts: tuple[Tensor, ...] = (vectors,)
    elif isinstance(vectors, Int8Codes):
        parts = (vectors.scales,)
    else:
        parts = (vectors.scales, vectors.biases)
    if not all(map(are_finite, parts)):
        raise not_finite(name, layer)


def not_finite(name: str, layer: int) -> ArgumentError:
    """The error of a side, keys or values, that has a NaN or an infinity."""
    return ArgumentError(f"cache must have finite numbers, got NaN or infinity in {name} of layer {layer}")


def expect_exact(cache: CarriedCache, dtype: str, rounding: bool) -> None:
    """Raise ArgumentError if a float dtype cannot hold a cache without rounding, unless it was asked for.

    Args:
        cache: The cache.
        dtype: One of ``FLOATS``.
        rounding: Whether rounding was asked for.
    """
    rounded = [kind for kind in cache.kinds if dtype not in (kind, "float32")]
    if rounded and not rounding:
        raise ArgumentError(
            f"kind must hold {', '.join(rounded)} without rounding, got {dtype}: rounding was not asked for"
        )
