"""The processor that figures are taken on: its name and its last-level caches."""

import os
import platform
import re
from pathlib import Path

INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}


def name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor, its family and model (names are shared), its widest instructions and its cores."""
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    fields = {field.strip(): value.strip() for field, _, value in (x.partition(":") for x in lines)}
    text = fields.get("model name", platform.processor())
    if {"cpu family", "model"} <= fields.keys():
        text += f" (family {fields['cpu family']}, model {fields['model']})"
    widest = [with_it for flag, with_it in INSTRUCTIONS.items() if flag in fields.get("flags", "").split()]
    text += f" with {widest[0]}" if widest else ""
    return f"{text}, {os.cpu_count()} cores"


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
