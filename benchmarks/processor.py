"""The processor that figures are taken on: its name and its last-level caches."""

import os
import re
from pathlib import Path

from kvloom.graphics.machine import processor_name as name

__all__ = ["last_level_cache", "name", "slug"]


def slug(name: str) -> str:
    """A processor's name, as a folder's."""
    return "-".join(re.findall("[a-z0-9]+", name.lower()))


def last_level_cache(system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the last-level caches of the cores that this process may use; 0 where ``system`` has none."""
    sizes = {}
    for core in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        caches = (system / f"cpu{core}" / "cache").glob("index*")
        names = ("level", "shared_cpu_list", "size")
        said = [[(cache / name).read_text(encoding="ascii").strip() for name in names] for cache in caches]
        if said:
            _, cores, size = max(said)
            sizes[cores] = int(size.removesuffix("K")) << 10
    return sum(sizes.values())
