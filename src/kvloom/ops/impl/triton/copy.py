"""Copy: slots to slots, unchanged. Everything is read into buffers before anything is written."""

from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.indexing import check_slots
from kvloom.ops.impl.triton import sides
from kvloom.ops.impl.triton.load import load
from kvloom.ops.impl.triton.places import as_bits
from kvloom.ops.impl.triton.store import store


def copy(sources: list[Tensor], source_slots: Tensor, targets: list[Tensor], target_slots: Tensor) -> None:
    """Same contract as the reference: source and target may be one cache."""
    for name, slots, caches in (
        ("source_slots", source_slots, sources),
        ("target_slots", target_slots, targets),
    ):
        if can_read(slots):
            check_slots(name, slots, caches[0].shape[:3].numel())
    sources, targets = ([as_bits(x) for x in caches] for caches in (sources, targets))
    rows = [load(source_slots, x, None, None, None, x.dtype, 1)[0] for x in sources]
    for x, target in zip(rows, targets, strict=True):
        store(x, None, target_slots, target, None, None, None)


def why_not(
    sources: list[Tensor], source_slots: Tensor, targets: list[Tensor], target_slots: Tensor
) -> str | None:
    """Reason why these cannot be copied here, or ``None``."""
    return next((why for x in targets if (why := sides.why_not(x, None)) is not None), None)
