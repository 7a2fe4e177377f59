"""Groups of the layers of one cache: those that hold the same number of tokens share sequences.

A layer leaves its group when another number of tokens is assigned to it, as when some of them are evicted.
It joins the group of that number, or begins one, whose pages are the group's alone: a page has room in every
layer of its pool, so among the pages of the other layers a short layer would take as much as a long one.
"""

from typing import Any
from weakref import WeakValueDictionary

from kvloom.caches.pages import Pages
from kvloom.caches.sequences import Sequences


class Groups:
    """The groups that layers of one cache have begun.

    Attributes:
        num_changes: How often a layer went to another group, or changed ``num_removed``.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._begun: WeakValueDictionary[tuple[int, int], Sequences] = WeakValueDictionary()

    def __reduce__(self) -> Any:
        """To be saved: layers that are loaded keep their sequences, and join no others."""
        return Groups, (), {"num_changes": self.num_changes}

    def find(self, old: Sequences, layer: int, num_tokens: int, num_removed: int) -> Sequences:
        """The sequences that a layer joins with ``num_tokens`` tokens of each row of ``old``.

        Args:
            old: Its sequences so far, which have no window.
            layer: Its number among those that share sequences.
            num_tokens: Tokens of each sequence.
            num_removed: Tokens that it has seen and no longer holds.

        Returns:
            Those of other layers of as many tokens, or new ones without tokens.
        """
        found = self._begun.get((num_tokens, num_removed))
        if found is not None and found is not old and layer not in found.storages:
            is_fitting = (
                found.num_positions == num_tokens and found.size == old.size and not any(found.begins)
            )
            if is_fitting and _is_alone(found):
                return found
        return Sequences(Pages(old.format), None, old.rollback)

    def move(self, old: Sequences, new: Sequences, layer: int, num_tokens: int, num_removed: int) -> None:
        """Note that a layer went from ``old`` to ``new``, and free what it had there if no other reads it."""
        self._begun[num_tokens, num_removed] = new
        self.num_changes += 1
        if _is_alone(old) and not old.pages.is_kept:
            old.storages.pop(layer, None)
            if old.residual is not None:
                old.residual.storages.pop(layer, None)


def _is_alone(sequences: Sequences) -> bool:
    """Whether no other sequences hold pages of the same pool."""
    return not any(user.size for user in sequences.pages.users if user is not sequences)
