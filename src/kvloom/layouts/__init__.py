"""Named layouts, and any layout to any other: keys and values of every layer, without touching a code."""

from kvloom.layouts.catalog import LAYOUTS, NamedLayout, find_layout
from kvloom.layouts.conversion import Placement, convert
from kvloom.layouts.files import convert_file
from kvloom.layouts.tensors import KVTensors

__all__ = ["LAYOUTS", "KVTensors", "NamedLayout", "Placement", "convert", "convert_file", "find_layout"]
