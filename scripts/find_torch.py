"""Prints the folder of the torch whose headers the kernels are built with, without importing it.

An isolated build cannot import the torch of the target environment, but can read its headers. Any torch with
the stable ABI will do: kernels built with one load into all.
"""

import site
import sys
from importlib.machinery import PathFinder


def find_torch() -> str | None:
    """The folder of the torch of this build, or else of this interpreter's environment."""
    spec = PathFinder.find_spec("torch", [*sys.path, *site.getsitepackages(), site.getusersitepackages()])
    folders = spec.submodule_search_locations if spec else None
    return folders[0] if folders else None


if __name__ == "__main__":
    found = find_torch()
    if found is None:
        sys.exit("no torch for this build")
    sys.stdout.write(found)
