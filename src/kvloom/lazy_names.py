"""Names of a package that load on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def getattr_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` of a package whose names load on first use.

    Args:
        package: The package.
        homes: Names, and the module of the package in which each is.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return load
