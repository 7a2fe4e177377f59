"""Batch invariance: a row has the same bits in any company, in layers that may be packed for it."""

from kvloom.integrations.transformers.invariance.install import (
    NO_WISH,
    LayerReport,
    Wish,
    expect_wish,
    hold_layers,
    packable_bytes,
    release_layers,
    report_layers,
)

__all__ = [
    "NO_WISH",
    "LayerReport",
    "Wish",
    "expect_wish",
    "hold_layers",
    "packable_bytes",
    "release_layers",
    "report_layers",
]
