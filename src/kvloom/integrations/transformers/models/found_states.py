"""Outputs of an encoder that did not run, since the keys and values of what it would read were found.

Shapes: B rows, N tokens of the encoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from kvloom.errors import StateError


class FoundStates(Tensor):
    """Hidden states that nobody computed: they have a shape ``[B, N, ...]``, and raise where they are read.

    Args:
        like: Tensor of this shape and dtype, on any device.
        device: Device that they say they are on.
        owner: What the cache whose keys were found has, too.

    Attributes:
        owner: As above.
    """

    owner: object

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, owner: object) -> "FoundStates":  # noqa: PYI034
        """As the class says."""
        made: FoundStates = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.owner = owner
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"FoundStates({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What other shapes and rows of them are; an error for what needs their numbers."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        own = next(x for x in tensors if isinstance(x, FoundStates))
        is_read = any(x.is_floating_point() and not isinstance(x, FoundStates) for x in tensors)
        if is_read or func is torch.ops.aten._local_scalar_dense.default:
            raise StateError(
                f"the encoder did not run, as the keys and values of what it would read were found, but "
                f"{func} reads its outputs: call generate without **cache.skip_encoder()"
            )
        args, kwargs = pytree.tree_map_only(Tensor, _shape_of, (args, kwargs or {}))
        found = func(*args, **{name: x for name, x in kwargs.items() if name != "device"})
        return pytree.tree_map_only(Tensor, lambda x: cls(x, own.device, own.owner), found)


class EncoderOutputs(NamedTuple):
    """What is kept of an encoder's outputs of one row: shapes of numbers, and masks.

    Attributes:
        kind: Their class.
        fields: Tensors ``[1, N, ...]`` by name; those of floating point have no data.
    """

    kind: type
    fields: dict[str, Tensor]

    @classmethod
    def of_rows(cls, outputs: Any) -> "list[EncoderOutputs]":
        """Those of each row of a batch; none if ``outputs`` are no outputs of an encoder."""
        is_named = isinstance(outputs, Mapping)
        if not is_named and not isinstance(outputs, tuple):
            return []
        named = dict(outputs) if is_named else {"last_hidden_state": outputs[0]}
        kept = {name: x for name, x in named.items() if isinstance(x, Tensor) and x.ndim}
        if "last_hidden_state" not in kept:
            return []
        fields = {name: _shape_of(x) if x.is_floating_point() else x.clone() for name, x in kept.items()}
        kind = type(outputs) if is_named else BaseModelOutput
        rows = range(len(kept["last_hidden_state"]))
        return [cls(kind, {name: x[row : row + 1] for name, x in fields.items()}) for row in rows]

    @staticmethod
    def joined(rows: "Sequence[EncoderOutputs]", device: torch.device, owner: object) -> Any:
        """Outputs of a batch of these rows, with ``FoundStates`` in place of numbers."""
        fields = {name: torch.cat([row.fields[name] for row in rows]) for name in rows[0].fields}
        found = {
            name: FoundStates(x, device, owner) if x.device.type == "meta" else x
            for name, x in fields.items()
        }
        return rows[0].kind(**found)


def _shape_of(x: Tensor) -> Tensor:
    """A tensor of the same shape without data."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
