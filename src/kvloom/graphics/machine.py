"""Which machine and which versions results are of. Imports none of the packages that it names."""

import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_INSTRUCTIONS: Final = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
_PACKAGES: Final = ("kvloom", "torch", "transformers", "triton", "onnxruntime")
"""Those that decide results; what is not installed is left out."""


def processor_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor, its family and model (names are shared), its widest instructions and its cores."""
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    fields = {field.strip(): value.strip() for field, _, value in (x.partition(":") for x in lines)}
    text = fields.get("model name", platform.processor())
    if {"cpu family", "model"} <= fields.keys():
        text += f" (family {fields['cpu family']}, model {fields['model']})"
    widest = [with_it for flag, with_it in _INSTRUCTIONS.items() if flag in fields.get("flags", "").split()]
    text += f" with {widest[0]}" if widest else ""
    return f"{text}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Versions of what decides results, by package."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def this_machine() -> str:
    """Processor, system, versions and date, in a line."""
    system = f"{platform.system()}, Python {platform.python_version()}"
    packages = ", ".join(" ".join(x) for x in versions().items())
    return f"{processor_name()}, {system}, {packages}, {date.today()}"
