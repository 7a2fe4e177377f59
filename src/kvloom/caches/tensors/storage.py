"""The tensors of one layer: keys, values and their scales, in pages of extents.

Values of head dim 0 are not stored: a storage of keys only accepts and returns them.

Shapes: B sequences, Q new tokens of each, H heads, D head dim.
"""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat, is_in_rows, page_layout
from kvloom.caches.tensors.memory import is_held_by_others, move, outside_inference_mode, zeros
from kvloom.caches.tensors.residual import Unquantized, attend_beside, scores_of_newest
from kvloom.caches.tensors.token_index import TokenIndex
from kvloom.caches.tensors.tokens import Tokens
from kvloom.caches.tensors.transform import Transform, attend, stored_by
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.core.entries import Entry
from kvloom.core.specs import KVSpec
from kvloom.core.views import KVView, raw
from kvloom.ops import KeySmoothing

Tensors: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Keys, values, scales of keys, scales of values."""


class Storage:
    """Extents of ``stride`` pages each: page i of extent e begins at slot ``(e * stride + i) * page_size``.

    Args:
        key: Spec of the keys; its layout is ignored.
        value: Spec of the values; ``None`` without any.
        page_size: Token slots in a page.
        device: Device of the tensors.
        layout: As ``CacheFormat.layout``.
        is_gathered: Whether attention reads gathered tensors, which decides what ``"auto"`` is.
        smoothing: Smoothing of keys that are codes; others are not smoothed.

    Attributes:
        transform: Transform of keys and values before quantization; ``None`` for none.
        needs_positions: Whether stored keys depend on their positions in the text.
        entry: Entry of a token.
        has_codes: Whether keys or values are codes.
        full_range: Whether codes of 4 and 2 bits are in full range.
        has_values: Whether values are kept.
    """

    def __init__(
        self,
        key: KVSpec,
        value: KVSpec | None,
        page_size: int,
        device: torch.device,
        layout: str = "auto",
        *,
        is_gathered: bool = False,
        smoothing: KeySmoothing | None = None,
    ) -> None:
        self.layout, self.is_gathered = layout, is_gathered
        self._is_in_rows = is_in_rows(layout, is_gathered)
        of_value = None
        if value is not None:
            of_value = replace(
                value, layout=page_layout(layout, "value", value, page_size, device, is_gathered)
            )
        of_key = replace(key, layout=page_layout(layout, "key", key, page_size, device, is_gathered))
        self.specs = of_key, of_value
        device = torch.empty(0, device=device).device  # with its device index
        self.transform = Transform.of(key, value, None if smoothing is None else smoothing.to(device))
        self.needs_positions = self.transform is not None and self.transform.needs_positions
        self.entry = Entry(key.heads, key.side, None if value is None else value.side)
        self.has_codes = self.entry.has_codes
        self.has_values = value is not None
        self.full_range = any(side.full_range for side in self.entry.sides)
        self.page_size = page_size
        self.device = device
        self.num_extents = self.stride = 0
        self._found: tuple[tuple[slice, int], tuple[Tensor, Tensor] | None] | None = None
        self.tensors = self._allocate(0, 0)
        self.view = self._view(self.tensors)

    @classmethod
    def of(
        cls, format: CacheFormat, key: Tensor, value: Tensor, page_size: int, *, is_gathered: bool = False
    ) -> "Storage":
        """Make an empty storage for keys and values such as these, ``[B, H, Q, D]``."""
        specs = format.specs_of(key, value)
        return cls(
            *specs,
            page_size,
            key.device,
            format.layout,
            is_gathered=is_gathered,
            smoothing=format.smoothing,
        )

    def like(self, page_size: int) -> "Storage":
        """Make an empty storage of the same specs with another page size; not native if that does not fit."""
        is_native = self.layout == "native" and page_size != self.page_size
        layout = "auto" if is_native else self.layout
        return Storage(
            *self.specs,
            page_size,
            self.device,
            layout,
            is_gathered=self.is_gathered,
            smoothing=self.smoothing,
        )

    @property
    def smoothing(self) -> KeySmoothing | None:
        """Smoothing of the keys; ``None`` if they are not smoothed."""
        return None if self.transform is None else self.transform.smoothing

    @property
    def num_pages(self) -> int:
        """Number of pages allocated."""
        return self.num_extents * self.stride

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return sum(x.nbytes for x in self.tensors if x is not None)

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included."""
        return float(self.entry.nbytes)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Views of keys and values ``[extents, H, slots, D]``; ``None`` if the tensors have no such view."""
        if self.has_codes or not self.stride:
            return None
        if not (self._is_in_rows or self.stride == 1 or self.specs[0].axes.axes == "B S H D"):
            return None
        key, *values = (
            x.squeeze((2, 4)).view(self.num_extents, -1, x.shape[3], x.shape[5]).transpose(1, 2)
            for x in _canonical(self.view)
        )
        return key, values[0] if values else key[..., :0]

    def rows_of(self, extents: slice, start: int) -> tuple[Tensor, Tensor] | None:
        """``rows`` of some extents from slot ``start`` on; the same tensors as long as nothing changes."""
        if self._found is None or self._found[0] != (extents, start):
            rows = self.rows()
            found = None if rows is None else (rows[0][extents, :, start:], rows[1][extents, :, start:])
            self._found = (extents, start), found
        return self._found[1]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of heads and head dims, by axis name."""
        key, value = self.specs
        return {"H": key.heads, "Dk": key.head_dim, "Dv": 0 if value is None else value.head_dim}

    def serves(self, key: Tensor, value: Tensor, batch: int) -> bool:
        """Whether keys and values ``[batch, H, Q, D]`` can be stored here; they must have one dtype."""
        a, b = self.specs
        return (
            key.ndim == value.ndim == 4
            and key.shape[0] == value.shape[0] == batch
            and key.shape[1] == value.shape[1] == a.heads
            and key.shape[2] == value.shape[2]
            and (key.shape[3], value.shape[3]) == (a.head_dim, 0 if b is None else b.head_dim)
            and key.dtype == value.dtype
            and key.dtype in FLOAT_DTYPES
            and key.device == value.device == self.device
        )

    def tokens(
        self, index: TokenIndex, window: int | None = None, rows: tuple[Tensor, Tensor] | None = None
    ) -> Tokens:
        """Tokens of this storage; arguments as of ``Tokens``."""
        return Tokens(self.view, index, window, rows, self.transform)

    def store(self, key: Tensor, value: Tensor, slots: Tensor, positions: Tensor | None = None) -> None:
        """Write ``[B, H, Q, D]`` to slots ``[B, Q]``, or ``[T, H, D]`` to ``[T]``.

        Args:
            key: As above.
            value: As above.
            slots: As above.
            positions: Positions of the tokens in their texts, as ``slots``, int64; read if
                ``needs_positions``.
        """
        how = stored_by(self.transform, positions)
        ops.store(key, self.kept(value), slots, self.view, full_range=self.full_range, **how)

    def kept(self, value: Tensor) -> Tensor | None:
        """``value``, or ``None`` in a storage of keys only."""
        return value if self.has_values else None

    def attend(
        self,
        query: Tensor,
        batch: ops.Batch,
        scores: ops.Scores,
        first_position: Tensor | None = None,
        is_latent: bool = False,
        beside: "tuple[Storage, ops.Batch, int] | None" = None,
    ) -> Tensor:
        """Attention over this storage; as ``ops.attend``.

        Args:
            query: As of ``ops.attend``.
            batch: The same.
            scores: The same, without a positional bias.
            first_position: ``[B]``, position in its text of token 0 of each sequence of the index; ``None``
                for 0.
            is_latent: As of ``ops.attend``.
            beside: Storage of a residual window, the same queries with slots in it, and its length: each
                query reads that many of the last tokens unquantized, its own included. ``None`` without one.
        """
        codes = self.view, batch, scores, self.transform, first_position, is_latent
        if beside is None:
            return attend(query, *codes)
        exact, newest, num_newest = beside
        own = Unquantized(exact.view, newest, scores_of_newest(scores, num_newest))
        return attend_beside(query, own, *codes, skip=num_newest)

    def replace(self, new: Mapping[int, Tensor], slots: Tensor, positions: Tensor | None = None) -> None:
        """Store keys (0), values (1) or both; a negative slot skips a token."""
        if len(new) == 2:
            self.store(new[0], new[1], slots, positions)
            return
        for side, x in new.items():  # as a cache of keys only
            spec, tensor, scale = self.specs[side], self.tensors[side], self.tensors[side + 2]
            if spec is None or tensor is None:
                continue
            how = None if self.transform is None else self.transform.side(side)
            view = KVView.split(spec.axes, tensor, None, scale)
            ops.store(x, None, slots, view, full_range=self.full_range, **stored_by(how, positions))

    def reserve(self, num_extents: int, stride: int) -> None:
        """Grow extents to at least ``stride`` pages; tokens keep their place in their extent, at other slots.

        Views taken before, such as ``view``, are stale afterwards. On a CPU old memory is given back while it
        is copied, unless others hold the old tensors, which do not change then.
        """
        if stride > self.stride:
            self._reallocate(num_extents, stride, gives_back=self._is_alone())

    def renew(self) -> None:
        """Copy all tokens to new tensors, at the same slots; the old tensors do not change."""
        self._reallocate(self.num_extents, self.stride, gives_back=False)

    def _is_alone(self) -> bool:
        """Whether nobody else holds the tensors, which are on a CPU."""
        if self.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        views = [weakref.ref(x) for x in _canonical(self.view)]
        self.view = self._found = None  # type: ignore[assignment]
        try:
            return not any(x() is not None for x in views) and not any(
                is_held_by_others(x) for x in self.tensors if x is not None
            )
        finally:
            self.view = self._view(self.tensors)

    def _reallocate(self, num_extents: int, stride: int, *, gives_back: bool) -> None:
        tensors, old = self._allocate(num_extents, stride, is_touched=False), _canonical(self.view)
        have, view = self.stride, self._view(tensors)
        for target, source in zip(_canonical(view), old, strict=True):
            if self._is_in_rows:
                count = source.shape[1] if have else 0
            else:
                count, target = have, target.unflatten(0, (num_extents, stride))
                source = source.unflatten(0, (num_extents, have)) if have else source
            if have:
                move(source, target[:, :count], gives_back=gives_back)
            raw(target)[:, count:].zero_()  # which touches it, so that ``nbytes`` is what is taken
        # At once, so that Ctrl-C leaves all of the old or all of the new.
        self.num_extents, self.stride, self.tensors, self.view, self._found = (
            num_extents, stride, tensors, view, None,
        )  # fmt: skip

    def _view(self, tensors: Tensors) -> KVView:
        key, value = self.specs
        return KVView.split(key.axes, *tensors, value_layout=None if value is None else value.axes)

    def _allocate(self, num_extents: int, stride: int, *, is_touched: bool = True) -> Tensors:
        num_slots = num_extents * stride * self.page_size
        block_size = self.page_size * (stride if self._is_in_rows and stride else 1)
        with outside_inference_mode():
            sizes = num_slots, block_size, self.device, is_touched
            key, key_scale = _allocate_side(self.specs[0], *sizes)
            value, value_scale = None, None
            if self.specs[1] is not None:
                value, value_scale = _allocate_side(self.specs[1], *sizes)
        return key, value, key_scale, value_scale


def _allocate_side(
    spec: KVSpec, num_slots: int, block_size: int, device: torch.device, is_touched: bool
) -> tuple[Tensor, Tensor | None]:
    """Allocate cache and scale of one side, zeroed, as ``spec.empty``."""
    cache, *scale = (zeros(*x, device, is_touched=is_touched) for x in spec.tensors(num_slots, block_size))
    return cache, scale[0] if scale else None


def _canonical(view: KVView) -> list[Tensor]:
    """Tensors of a view that are not ``None``, ``[B, S/s, s, H, D/d, d]``."""
    return [x for x in view.tensors if x is not None]
