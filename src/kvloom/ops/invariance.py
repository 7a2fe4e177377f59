"""Attention that has the same bits in calls of any number of new tokens, on every processor."""

from weakref import finalize

from kvloom.ops.impl.cpu import hold_batch_invariance, is_batch_invariant, why_not_batch_invariant

__all__ = ["BatchInvariance", "is_batch_invariant", "why_not_batch_invariant"]


class BatchInvariance:
    """While there is one, ``attend`` and ``attend_part`` are batch invariant in all of this process.

    A token then has the same bits however its text is cut into calls. They are anyway, but on processors with
    AMX where queries are bfloat16: there calls of more than 16 new tokens of a sequence have kernels and bits
    of their own, and take those of few new tokens while this is there. That takes longer: over codes in
    groups of a multiple of 32 as long as with ``KVLOOM_ISA=avx512``, over others and bfloat16, by an
    estimate, two to four times as long. Calls of up to 16 new tokens, and other processors, are as without.

    It ends with ``close``, as a context manager, or when it is collected; there may be several at once, in
    any threads. A call keeps the kernels that it began with. A copy is one more.
    """

    def __init__(self) -> None:
        hold_batch_invariance(1)
        self._end = finalize(self, hold_batch_invariance, -1)
        self._end.atexit = False

    def close(self) -> None:
        """End it; once is enough."""
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
