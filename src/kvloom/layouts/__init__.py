"""Named layouts, and conversion of any layout to any other: keys and values of every layer, codes unchanged.

Names load on first use, since ``kvloom --help`` needs no torch.
"""

from typing import TYPE_CHECKING

from kvloom.lazy_names import getattr_of

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

__getattr__ = getattr_of(__name__, _HOME)
