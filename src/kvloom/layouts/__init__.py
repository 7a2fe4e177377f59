"""Named layouts, and conversion of any layout to any other: keys and values of every layer, codes unchanged.

Names load on first use, since ``kvloom --help`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.layouts.catalog import LAYOUTS, NamedLayout, find_layout
    from kvloom.layouts.conversion import Placement, convert
    from kvloom.layouts.files import convert_file
    from kvloom.layouts.tensors import KVTensors

_HOME = {
    "LAYOUTS": "catalog",
    "KVTensors": "tensors",
    "NamedLayout": "catalog",
    "Placement": "conversion",
    "convert": "conversion",
    "convert_file": "files",
    "find_layout": "catalog",
}

__all__ = ["LAYOUTS", "KVTensors", "NamedLayout", "Placement", "convert", "convert_file", "find_layout"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvloom.layouts' has no attribute {name!r}")
    return getattr(import_module(f"kvloom.layouts.{_HOME[name]}"), name)
