"""Assignment to ``keys`` and then ``values`` of a layer, or in the other order.

Shapes: B sequences, H key/value heads, N tokens, D head dim.
"""

from typing import Final

from torch import Tensor

from kvloom.errors import ShapeError, StateError

SIDES: Final = ("keys", "values")


class Assignment:
    """Keys or values that were assigned with a new length, pending until the other side has it, too.

    Attributes:
        waiting: The pending side, 0 for keys and 1 for values, and its tensor; ``None`` if none is pending.
    """

    def __init__(self) -> None:
        self.waiting: tuple[int, Tensor] | None = None

    def get(self, side: int) -> Tensor | None:
        """Pending tensor of a side, 0 for keys and 1 for values; ``None`` if there is none."""
        return self.waiting[1] if self.waiting is not None and self.waiting[0] == side else None

    def add(self, side: int, x: Tensor, num_held: int | None, fixed: str | None) -> dict[int, Tensor] | None:
        """Assign ``x`` ``[B, H, N, D]`` and return the sides that can be replaced now.

        Args:
            side: 0 for keys, 1 for values.
            x: New keys or values.
            num_held: Number of tokens now; ``None`` before the first update.
            fixed: Reason why the number of tokens cannot change; ``None`` if it can.

        Returns:
            One side or both; ``None`` if ``x`` is pending.

        Raises:
            ShapeError: the number of tokens is wrong; nothing was changed.
            StateError: it is before the first update, and the number is fixed; nothing was changed.
        """
        name, other, num_tokens = SIDES[side], self.get(1 - side), x.shape[2]
        if other is not None:
            if other.shape[2] != num_tokens:
                raise ShapeError(
                    f"{name} must have {other.shape[2]} tokens as {SIDES[1 - side]} were assigned, "
                    f"got {num_tokens}"
                )
            return {side: x, 1 - side: other}
        if num_tokens == num_held:
            return {side: x}
        if fixed is not None and num_held is None:
            raise StateError(f"{name} can be assigned after the first update, got {num_tokens} tokens before")
        if fixed is not None:
            raise ShapeError(f"{name} must have {num_held} columns, {fixed}, got {num_tokens}")
        self.waiting = side, x
        return None

    def clear(self) -> None:
        """Drop the pending side."""
        self.waiting = None

    def expect_none(self, num_held: int) -> None:
        """Raise StateError if a side is pending, where the layer has ``num_held`` tokens."""
        if self.waiting is not None:
            side, x = self.waiting
            raise StateError(
                f"{SIDES[1 - side]} must be assigned {x.shape[2]} tokens before anything else, as "
                f"{SIDES[side]} were, got {num_held}"
            )
