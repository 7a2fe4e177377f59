"""Batch invariance: layers, possibly packed, that give a row the same bits in any batch."""

from kvloom.integrations.transformers.invariance.install import (
    BY_CUTS,
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
    "BY_CUTS",
    "NO_WISH",
    "LayerReport",
    "Wish",
    "expect_wish",
    "hold_layers",
    "packable_bytes",
    "release_layers",
    "report_layers",
]
