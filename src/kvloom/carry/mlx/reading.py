"""A file of mlx-lm's ``save_prompt_cache`` as a ``CarriedCache``.

Files have two forms, and neither version of mlx-lm reads the other's.

A layer's keys and values are tensors ``[1, H, slots, D]``; of codes they are words, scales and offsets. In
0.32.2 latents and rope keys take their place, one head each; the pairs of the rope keys are adjacent.

=====================  ============================================  ===================================
what                   0.32.2                                        0.28.4
=====================  ============================================  ===================================
class of layer i       metadata ``1.i``                              metadata ``2.i``
numbers of layer i     tensors without axes, ``i.2`` and on: tokens  metadata ``0.i.0`` and on: tokens
                       (and, of codes, group and bits)               of codes, group, bits; of floats
                                                                     tokens are the slots
metadata of the user   ``0.name``                                    ``1.name``
=====================  ============================================  ===================================
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kvloom.carry.carried import (
    ALL,
    AffineCodes,
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    Vectors,
    num_held,
    own_tokens,
    part_of,
)
from kvloom.carry.files.bytes import Source, bytes_of
from kvloom.carry.files.tensor_file import DTYPES, FLOAT_NAMES, StoredTensor, read_tensors
from kvloom.carry.geometry import CacheGeometry, expect_layers
from kvloom.carry.mlx.affine import BITS
from kvloom.carry.rope_pairs import expect_pairs_named, to_halves
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError, UnsupportedError

TOKENS: Final = "kvloom_tokens"
"""Name of the metadata in which this library writes the ids of the tokens."""
_FLOAT_NAMES: Final = (*FLOAT_NAMES.values(),)
CODES, FLOATS, RING = "QuantizedKVCache", "KVCache", "RotatingKVCache"


def read_mlx(
    source: Source,
    geometry: CacheGeometry | None = None,
    *,
    pairs: str = "halves",
    tokens: Sequence[int] | None = None,
) -> CarriedCache:
    """The cache in a file of mlx-lm; numbers are read, layer by layer, when they are asked for.

    Args:
        source: A path, or bytes of a file.
        geometry: Sizes of the model's layers; ``None`` for those of the file.
        pairs: Order of RoPE's pairs in the keys: ``"adjacent"`` if the model has ``rope_traditional``.
        tokens: Ids of the tokens that are held; ``None`` for those that this library wrote, if it did.

    Raises:
        ArgumentError: the file is damaged or of another model, or tokens are others.
        UnsupportedError: a layer has a class, or codes have bits, that are not carried.
        OSError: the file cannot be read.
    """
    expect_pairs_named("pairs", pairs)
    stored, metadata = read_tensors(bytes_of("source", source))
    prompt_cache = _PromptCache(stored, metadata)
    rotary = [x.rotary for x in geometry.layers] if geometry is not None and pairs == "adjacent" else None
    layers = []
    for i in range(prompt_cache.num_layers):
        turned = None if pairs != "adjacent" else rotary[i] if rotary and i < len(rotary) else 0
        sizes = geometry.layers[i] if geometry is not None and i < len(geometry.layers) else None
        layers.append(
            prompt_cache.layer(i, turned)
            if sizes is None or not sizes.has_latents
            else prompt_cache.latents(i, sizes.rotary)
        )
    counts = {prompt_cache.num_tokens(i) for i in range(prompt_cache.num_layers)}
    if len(counts) != 1:
        raise ArgumentError(f"source must have as many tokens in every layer, got {sorted(counts)}")
    ids = _tokens(prompt_cache.user.get(TOKENS), tokens)
    said = tuple(sorted((k, v) for k, v in prompt_cache.user.items() if k != TOKENS))
    cache = CarriedCache(tuple(layers), counts.pop(), ids, said)
    if geometry is not None:
        expect_layers(cache, geometry)
    return cache


class _PromptCache:
    """Names of a file, of either version."""

    def __init__(self, stored: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
        self._stored, self._metadata = stored, metadata
        self.is_old = metadata.get("2.0", "") != ""
        front = "1." if self.is_old else "0."
        self.user = {k.removeprefix(front): v for k, v in metadata.items() if k.startswith(front)}
        kinds = "2." if self.is_old else "1."
        self._classes = {k: v for k, v in metadata.items() if k.startswith(kinds)}
        self.num_layers = len(self._classes)
        wanted = {f"{kinds}{i}" for i in range(self.num_layers)}
        if not self.num_layers or self._classes.keys() != wanted:
            raise ArgumentError("source must be a prompt cache of mlx-lm, with a class of each layer")
        names = {name.partition(".")[0] for name in stored}
        if names != {str(i) for i in range(self.num_layers)}:
            raise ArgumentError(
                f"source must have tensors of its {self.num_layers} layers, got those of "
                f"{', '.join(sorted(names))}"
            )

    def _class(self, layer: int) -> str:
        name = self._classes[f"{'2.' if self.is_old else '1.'}{layer}"]
        known = (CODES, FLOATS) if self.is_old else (CODES, FLOATS, RING)
        if name not in known:
            raise UnsupportedError(f"source must have layers of {', '.join(known)}, got {name} in {layer}")
        return name

    def _tensor(self, name: str, dtypes: Sequence[str], axes: int) -> StoredTensor:
        found = self._stored.get(name)
        if found is None or found.dtype not in dtypes or len(found.shape) != axes:
            got = "none" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ArgumentError(f"source must have {name} of {axes} axes of {' or '.join(dtypes)}, got {got}")
        return found

    def _number(self, layer: int, place: int) -> int:
        """Number ``place`` of a layer: tokens, then others by its class."""
        if self.is_old and self._class(layer) == FLOATS:
            return self._tensor(f"{layer}.0", _FLOAT_NAMES, 4).shape[2]
        if not self.is_old:
            return int(self._tensor(f"{layer}.{place + 2}", ("I32",), 0).load())
        text = self._metadata.get(f"0.{layer}.{place}", "")
        if not (text.isascii() and text.isdecimal() and len(text) < 12):
            raise ArgumentError(f"source must have number {place} of layer {layer} in metadata, got {text!r}")
        return int(text)

    def num_tokens(self, layer: int) -> int:
        """Tokens that a layer has seen."""
        return self._number(layer, 0)

    def layer(self, number: int, rotary: int | None) -> CarriedLayer:
        """A layer; ``rotary`` is ``None`` for keys in halves, and 0 for whole keys in adjacent pairs."""
        kind, count = self._class(number), self.num_tokens(number)
        window, slots = None, slice(0, count)
        if kind == RING:
            window, held = (
                self._number(number, 2),
                self._tensor(f"{number}.0", _FLOAT_NAMES, 4).shape[2],
            )
            order = self._ring(number, held, count, window)
            sides = [self._floats(number, side, order, (rotary, None)[side]) for side in (0, 1)]
            return CarriedLayer(sides[0], sides[1], window)
        read = self._codes if kind == CODES else self._floats
        sides = [read(number, side, slots, (rotary, None)[side]) for side in (0, 1)]
        return CarriedLayer(sides[0], sides[1], window)

    def latents(self, number: int, rotary: int) -> CarriedLayer:
        """A layer of latents and rope keys, whose pairs are adjacent."""
        if self.is_old or self._class(number) != FLOATS:
            got = f"{self._class(number)} of {'an older' if self.is_old else 'this'} version"
            raise UnsupportedError(f"source must have latents in a {FLOATS} of 0.32.2, got {got} in {number}")
        slots = slice(0, self.num_tokens(number))
        latents, rope = self._floats(number, 0, slots, None), self._floats(number, 1, slots, rotary)
        return CarriedLayer(latents, rope, has_latents=True)

    def _ring(self, number: int, held: int, count: int, window: int) -> Tensor:
        """Slots of the last tokens of a ring of ``held`` slots, in order of positions."""
        keep, at = self._number(number, 1), self._number(number, 3)
        wanted = num_held(count, window) if window > 1 else 0
        if keep != 0:
            raise UnsupportedError(
                f"source must keep no first tokens in a ring, got {keep} in layer {number}"
            )
        if not 0 <= at <= held or window < 2:
            raise ArgumentError(f"source must have layer {number} within its ring, got slot {at} of {held}")
        slots = torch.arange(held)
        if at < held:
            slots = torch.cat((slots[at:], slots[:at])) if at < count else slots[:at]
        if len(slots) < wanted:
            raise ArgumentError(
                f"source must have the last {wanted} tokens in layer {number}, got {len(slots)}: a window "
                f"of {window}"
            )
        return slots[len(slots) - wanted :]

    def _floats(self, number: int, side: int, slots: slice | Tensor, rotary: int | None) -> CarriedSide:
        found = self._tensor(f"{number}.{side}", _FLOAT_NAMES, 4)
        count = self._expect_slots(number, found, slots)
        heads, dim = found.shape[1], found.shape[3]
        kind = dtype_name(DTYPES[found.dtype])
        turned = _turned(rotary, dim)
        return CarriedSide.of_adjacent(count, heads, dim, kind, partial(_rows, found, slots), turned)

    def _codes(self, number: int, side: int, slots: slice | Tensor, rotary: int | None) -> CarriedSide:
        words = self._tensor(f"{number}.{side}.0", ("U32",), 4)
        rest = [self._tensor(f"{number}.{side}.{part}", _FLOAT_NAMES, 4) for part in (1, 2)]
        count = self._expect_slots(number, words, slots)
        group, bits = self._number(number, 1), self._number(number, 2)
        if bits not in BITS:
            raise UnsupportedError(f"source must have codes of {BITS} bits, got {bits} in layer {number}")
        dim = words.shape[3] * 32 // bits
        wanted = (*words.shape[:3], dim // group if group > 0 else 0)
        if group < 1 or dim % group or any(x.shape != wanted for x in rest):
            raise ArgumentError(
                f"source must have a scale and an offset of each {group} elements in layer {number}, got "
                f"{[list(x.shape) for x in rest]} of {list(words.shape)}"
            )
        turned = _turned(rotary, dim)
        load = partial(_load_codes, (words, *rest), slots, bits, turned)
        return CarriedSide(count, words.shape[1], dim, f"affine{bits}:g{group}", load)

    @staticmethod
    def _expect_slots(number: int, found: StoredTensor, slots: slice | Tensor) -> int:
        """Tokens that are read, which the tensor has."""
        wanted = slots.stop if isinstance(slots, slice) else len(slots)
        if found.shape[0] != 1 or not 0 < wanted <= found.shape[2] or 0 in found.shape:
            raise ArgumentError(
                f"source must have one row and {wanted} tokens in layer {number}, got {list(found.shape)}"
            )
        return wanted


def _turned(rotary: int | None, head_dim: int) -> int:
    """Elements of a key to permute."""
    return 0 if rotary is None else rotary or head_dim


def _rows(stored: StoredTensor, slots: slice | Tensor, tokens: slice = ALL) -> Tensor:
    """Tokens of a tensor ``[1, H, slots, n]`` as ``[T, H, n]``."""
    return stored.load()[0][:, part_of(slots, tokens)].transpose(0, 1)


def _load_codes(
    stored: Sequence[StoredTensor], slots: slice | Tensor, bits: int, rotary: int, tokens: slice = ALL
) -> Vectors:
    words, scales, biases = (_rows(x, slots, tokens).contiguous() for x in stored)
    codes = AffineCodes(words, scales, biases, bits)
    return to_halves(codes.floats(), rotary) if rotary else codes


def _tokens(text: str | None, given: Sequence[int] | None) -> tuple[int, ...] | None:
    if text is None:
        return None if given is None else tuple(given)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"source must have its tokens as a list: {error}") from error
    if not isinstance(found, list) or not all(type(x) is int for x in found):
        raise ArgumentError("source must have its tokens as a list of ids")
    return own_tokens(found, given)
