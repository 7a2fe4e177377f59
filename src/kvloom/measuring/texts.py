"""Texts for measurements: held-out text of the bundled model, sources of installed packages, or a file.

Imports no torch and no package whose sources it reads.
"""

import hashlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvloom.core.arguments import read_text
from kvloom.errors import ArgumentError
from kvloom.models import iter_texts

HELD_OUT: Final = "held-out"
PACKAGES: Final = ("torch", "transformers")
"""Packages whose sources the bundled model was not trained on."""
_LEAST, _MOST = 2000, 100_000
"""Limits of a file's characters: no stub, and no table that would fill a text."""


def texts_named(name: str) -> Iterable[str]:
    """Iterate over texts.

    Args:
        name: ``"held-out"``, a package of ``PACKAGES`` for its sources, or a file.

    Raises:
        ArgumentError: there is no such package or file, or the file is not in UTF-8.
    """
    if name == HELD_OUT:
        return iter_texts("heldout")
    if name in PACKAGES:
        return _sources(_folder(name))
    return [read_text("--text", Path(name))]


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentError(f"--text must be an installed package, got {package!r}")
    return Path(next(iter(spec.submodule_search_locations)))


def _sources(folder: Path) -> Iterator[str]:
    """Files of ordinary length, ordered by a hash of their names, so that adjacent ones differ."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        if _LEAST <= len(text) <= _MOST:
            yield text
