"""Views of vLLM's pages: each head of a block has planes of keys, values and scales.

vLLM allocates pages ``[B, H, S, C]``, and copies, zeroes and sends whole blocks, so the ``S * C`` bytes of a
head in a block can have any order. They hold the keys of its tokens, then the values, and for codes the
scales of keys and of values, each in the axis order that attention reads best.

Shapes: B blocks, H key/value heads, S tokens of a block, D head dim, C elements of a token of a head.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import page_layout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ShapeError

BITS_OF_ROPE_KEYS: Final = 8
"""Least bits of rope keys beside quantized latents."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Format of the tokens of a head in a page.

    Attributes:
        key: Spec of keys, or latents; its layout is not read.
        value: Spec of values, or rope keys.
        is_latent: Whether these are latents and rope keys of one head. If unquantized, the latent and rope
            key of a token are adjacent then, as in vLLM's own pages.
    """

    key: KVSpec
    value: KVSpec
    is_latent: bool = False

    @classmethod
    def heads(cls, head_dim: int, dtype: torch.dtype, quant: QuantSpec | None) -> "PageFormat":
        """Format of keys and values.

        Args:
            head_dim: D, a multiple of the group.
            dtype: Dtype that the model computes in, and that of unquantized keys and values.
            quant: Quantization; ``None`` for unquantized pages.

        Raises:
            ConfigError: the group does not divide ``head_dim``.
        """
        spec = KVSpec(1, 1, head_dim, dtype, "T H D", quant)
        return cls(spec, spec)

    @classmethod
    def latents(cls, rank: int, rope: int, dtype: torch.dtype, quant: QuantSpec | None) -> "PageFormat":
        """Format of latents and rope keys; rope keys have 8 bits if latents have fewer.

        Rope keys are few channels, which hold the positions of all tokens.

        Args:
            rank: Elements of a latent.
            rope: Elements of a rope key.
            dtype: As in ``heads``.
            quant: Quantization of latents, and of rope keys if it has at least 8 bits; ``None`` for
                unquantized pages.

        Raises:
            ConfigError: the group does not divide ``rank`` or ``rope``.
        """
        of_rope = quant if quant is None or quant.bits >= BITS_OF_ROPE_KEYS else QuantSpec(BITS_OF_ROPE_KEYS)
        key, value = (KVSpec(1, 1, n, dtype, "T H D", x) for n, x in ((rank, quant), (rope, of_rope)))
        return cls(key, value, is_latent=True)

    @property
    def unquantized(self) -> "PageFormat":
        """The same format without quantization."""
        key, value = (replace(spec, quant=None) for spec in (self.key, self.value))
        return replace(self, key=key, value=value)

    @property
    def content_bytes(self) -> int:
        """Bytes of a token of a head, both sides, scales included."""
        return self.key.nbytes(1) + self.value.nbytes(1)

    def view(self, pages: Tensor) -> KVView:
        """Both sides and their scales in the pages of one layer; writing through the view writes the pages.

        Args:
            pages: ``[B, H, S, C]``, or ``[B, S, C]`` of one head, of any dtype, dense in the last two axes;
                blocks and heads may have any strides.

        Raises:
            ShapeError: ``pages`` are not dense, or not of ``content_bytes``.
        """
        pages = pages.unsqueeze(1) if pages.ndim == 3 else pages
        blocks, heads, size, content = pages.shape
        if pages.stride()[2:] != (content, 1):
            raise ShapeError(f"pages must be dense in tokens and content, got strides {pages.stride()}")
        if content * pages.itemsize != self.content_bytes:
            raise ShapeError(
                f"pages must have {self.content_bytes} bytes a token, got {content * pages.itemsize}"
            )
        if self.is_latent and self.key.quant is None:
            rows = pages.view(self.key.dtype)
            return KVView.split("B H S D", *rows.split((self.key.head_dim, self.value.head_dim), dim=-1))
        sides: tuple[tuple[Literal["key", "value"], KVSpec], ...] = ("key", self.key), ("value", self.value)
        name = "auto" if ops.cpu_kernels() and not self.is_latent else "HND"
        key, value = (
            replace(spec, heads=heads, layout=page_layout(name, side, spec, size, torch.device("cpu")))
            for side, spec in sides
        )
        both = zip(*(spec.tensors(blocks * size, size) for spec in (key, value)), strict=True)
        parts = [part for pair in both for part in pair]
        lengths = [prod(shape[2:]) * dtype.itemsize for shape, dtype in parts]
        runs = pages.view(torch.uint8).flatten(2)
        planes = [
            run.view(dtype).unflatten(-1, shape[2:])
            for run, (shape, dtype) in zip(runs.split(lengths, dim=-1), parts, strict=True)
        ]
        return KVView.split(key.axes, *planes, value_layout=value.axes)


def largest_block(tokens: int, most: int) -> int:
    """Largest divisor of ``tokens`` that is at most ``most``; at least 1."""
    return next((size for size in range(min(tokens, most), 1, -1) if tokens % size == 0), 1)
