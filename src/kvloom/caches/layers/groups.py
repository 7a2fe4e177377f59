"""Groups of layers of one cache: layers that hold the same number of tokens share sequences.

A layer leaves its group when another number of tokens is assigned to it, for example after some were evicted.
It joins the group of that number, or begins one with a pool of its own: a page takes memory in every layer of
its pool, so in the pool of the other layers a short layer would take as much as a long one.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.sequences import Sequences


class Groups:
    """Groups that layers of one cache have begun.

    Attributes:
        num_changes: Number of times that a layer changed its group or its ``num_removed``.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._begun: WeakValueDictionary[tuple[int, int], Sequences] = WeakValueDictionary()
        self._residuals: WeakKeyDictionary[Sequences, Sequences] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Pickle without groups: loaded layers keep their sequences, and join no others."""
        return Groups, (), {"num_changes": self.num_changes}

    def find(self, old: Sequences, layer: int, num_tokens: int, num_removed: int) -> Sequences:
        """Sequences that a layer joins when it has ``num_tokens`` tokens in each row of ``old``.

        Args:
            old: Present sequences of the layer, without a window.
            layer: Number of the layer among those that share sequences.
            num_tokens: Number of tokens of each sequence.
            num_removed: Number of tokens that the layer has seen and no longer holds.

        Returns:
            Sequences of other layers with the same number of tokens, or new ones without tokens.
        """
        found = self._begun.get((num_tokens, num_removed))
        if found is not None and found is not old and layer not in found.storages:
            is_fitting = (
                found.num_positions == num_tokens and found.size == old.size and not any(found.begins)
            )
            if is_fitting and _is_alone(found):
                return found
        return Sequences(Pages(old.format), None, old.rollback)

    def residual_of(self, begun: Sequences) -> Sequences | None:
        """The residual window beside a result of ``find``; ``None`` without one."""
        found = self._residuals.get(begun)
        if found is None and (found := begun.of_residual()) is not None:
            self._residuals[begun] = found
        return found

    def move(
        self, old: Iterable[Sequences], new: Sequences, layer: int, num_tokens: int, num_removed: int
    ) -> None:
        """Record that a layer moved from ``old`` to ``new``; free its storages in ``old`` if unused."""
        self._begun[num_tokens, num_removed] = new
        self.num_changes += 1
        for sequences in old:
            if _is_alone(sequences) and not sequences.pages.is_kept:
                sequences.storages.pop(layer, None)


def _is_alone(sequences: Sequences) -> bool:
    """Whether no other sequences hold pages of the same pool."""
    return not any(user.size for user in sequences.pages.users if user is not sequences)
