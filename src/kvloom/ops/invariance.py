"""Batch invariance: attention with the same bits in calls of any number of new tokens."""

from weakref import finalize

from kvloom.ops.impl.cpu import WHY_NOT as WHY_NOT_COMPILED
from kvloom.ops.impl.cpu import hold_batch_invariance, is_batch_invariant, why_not_batch_invariant

__all__ = ["WHY_NOT_COMPILED", "BatchInvariance", "is_batch_invariant", "why_not_batch_invariant"]


class BatchInvariance:
    """Holder of batch invariance: while one exists, ``attend`` and ``attend_part`` of this process have it.

    A token then has the same bits however its text is cut into calls. Only bfloat16 queries on processors
    with AMX need this: there, calls of more than 16 new tokens of a sequence have their own kernels and bits,
    and use the kernels for few tokens while a holder exists. That is slower: over codes in groups of a
    multiple of 32 as with ``KVLOOM_ISA=avx512``, over others and bfloat16, by an estimate, two to four times.
    Other calls and processors do not change.

    It ends with ``close``, as a context manager, or when it is collected. There may be several, in any
    threads; a copy is one more. A running call keeps its kernels.
    """

    def __init__(self) -> None:
        hold_batch_invariance(1)
        self._end = finalize(self, hold_batch_invariance, -1)
        self._end.atexit = False

    def close(self) -> None:
        """Release batch invariance; further calls do nothing."""
        self._end()

    def __enter__(self) -> "BatchInvariance":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type["BatchInvariance"], tuple[()], dict[str, bool]]:
        return BatchInvariance, (), {"is_open": self._end.alive}

    def __setstate__(self, state: dict[str, bool]) -> None:
        if not state["is_open"]:
            self.close()
