"""Copy: slots to slots, as they are. Everything is read into buffers before anything is written."""

from itertools import zip_longest

from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.indexing import check_slots
from kvloom.ops.impl.triton.load import load
from kvloom.ops.impl.triton.store import store


def copy(sources: list[Tensor], source_slots: Tensor, targets: list[Tensor], target_slots: Tensor) -> None:
    """As the reference: source and target may be one cache."""
    for name, slots, caches in (("source_slots", source_slots, sources), ("target_slots", target_slots, targets)):
        if can_read(slots):
            check_slots(name, slots, caches[0].shape[:3].numel())
    rows = [load(source_slots, x, None, None, None, x.dtype, 1)[0] for x in sources]
    # Two tensors to a launch.
    for (x, to), (y, other) in zip_longest(
        zip(rows[::2], targets[::2], strict=True), zip(rows[1::2], targets[1::2], strict=True), fillvalue=(None, None)
    ):
        store(x, y, target_slots, to, other, None, None)
