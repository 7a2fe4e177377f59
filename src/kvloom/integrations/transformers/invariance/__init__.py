"""Batch invariance: layers, possibly packed, that give a row the same bits in any batch."""

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
