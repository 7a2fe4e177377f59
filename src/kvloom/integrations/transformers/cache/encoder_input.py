"""What an encoder read, for as long as a cache has its keys: another input with the same cache is refused.

transformers takes the keys of a filled cache for those of whatever is given to the encoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from kvloom.errors import StateError
from kvloom.integrations.tensor_state import version_of
from kvloom.integrations.transformers.models.encoders import main_input
from kvloom.integrations.transformers.models.found_states import FoundStates

_CLOSE: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Part of its size by which a number of a row may differ, if another batch rounded it; 2e-2 in other dtypes.

One of 1,500 tokens changes it by about 2.6e-2.
"""


class EncoderInput:
    """Two numbers of each row of an encoder's input, by the name of the argument.

    Attributes:
        found: Owner of the ``FoundStates`` that stand for this input; ``None`` if it was not found.
    """

    def __init__(self) -> None:
        self.found: object | None = None
        self._of_rows: dict[str, Tensor] = {}  # [B, 2]: a sum with random signs, and its expected size
        self._last: tuple[ref[Tensor], int] | None = None  # what generate gives again in each step

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": None}

    def fork(self) -> "EncoderInput":
        """A copy."""
        other = EncoderInput()
        other._of_rows, other.found = {**self._of_rows}, self.found
        return other

    def row(self, row: int) -> "EncoderInput":
        """The input of one row, which was not found."""
        other = EncoderInput()
        other._of_rows = {name: x[row : row + 1] for name, x in self._of_rows.items()}
        return other

    @classmethod
    def joined(cls, rows: "Sequence[EncoderInput]") -> "EncoderInput":
        """The input of a batch of rows, each of which is of one row; what only some say is left out."""
        other, names = cls(), set.intersection(*({*row._of_rows} for row in rows))
        other._of_rows = {name: torch.cat([row._of_rows[name] for row in rows]) for name in names}
        return other

    def select(self, rows: Sequence[int]) -> None:
        """Replace row i by row ``rows[i]``."""
        self._of_rows = {name: x[[*rows]] for name, x in self._of_rows.items()}
        self._last = None

    def expect_same(self, inputs: Mapping[str, Any], *, is_new: bool) -> None:
        """Note what a forward is given if the cache ``is_new``, else check that it is the same.

        Raises:
            StateError: it is another input.
        """
        name = main_input(inputs)
        if not name or torch.compiler.is_compiling():
            return
        given = inputs[name][0] if name == "encoder_outputs" else inputs[name]
        if isinstance(given, FoundStates):
            if is_new or given.owner is not self.found:
                raise StateError(
                    "encoder_outputs must be computed for this cache, got what stands for those that another "
                    "cache found"
                )
            return
        if not isinstance(given, Tensor) or not (is_new or name in self._of_rows):
            return
        is_last = self._last is not None and self._last[0]() is given and self._last[1] == version_of(given)
        if is_last and name in self._of_rows:
            return
        found = numbers_of(given)
        if is_new:
            self._of_rows = {name: found}
        else:
            known = self._of_rows[name]
            close = _CLOSE.get(given.dtype, 2e-2) if given.is_floating_point() else 0.0
            if len(known) != len(found) or bool(((known - found)[:, 0].abs() > close * known[:, 1]).any()):
                raise StateError(
                    f"{name} must be what the cache has the encoder's keys of, got another input: make "
                    f"another cache, or reset this one"
                )
        self._last = ref(given), version_of(given)


def numbers_of(x: Tensor) -> Tensor:
    """Two numbers of each row of ``[B, ...]``: ``[B, 2]`` float64, on the CPU."""
    x = x.detach().flatten(1)
    generator = torch.Generator(x.device).manual_seed(0)
    signs = torch.rand(x.shape[1], dtype=torch.float64, device=x.device, generator=generator) - 0.5
    rows = map(Tensor.double, x)  # one at a time, which takes less memory
    return torch.stack([torch.stack((row @ signs, row.norm() / 12**0.5)) for row in rows]).cpu()
