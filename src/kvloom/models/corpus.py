"""Corpus of the bundled model: the standard library of the running interpreter.

Files are split into train and held-out by a hash of their path, so every Python can rebuild the same split.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 16
"""One file in this many is held out, about 6 %."""

# Third-party code, test suites (much of them data), and one directory of prose rather than code.
_SKIPPED_DIRECTORIES = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__phello__")
)
# Generated tables: character maps, entity names, installer schemas, the interpreter's build settings.
_GENERATED = ("encodings/", "stringprep.py", "html/entities.py", "msilib/", "config-", "_sysconfigdata")


@dataclass(frozen=True)
class SourceFile:
    """Source file; its `name` is the path below the library's root, with forward slashes."""

    name: str
    path: Path
    split: Split

    def read(self) -> str:
        """Read the file; line ends become a single newline and bytes that are not UTF-8 are replaced."""
        return self.path.read_text(encoding="utf-8", errors="replace")


def split_of(name: str) -> Split:
    """Split of the file called `name` (see `SourceFile`)."""
    digest = hashlib.sha256(name.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0 else "train"


def corpus_files(split: Split | None = None, root: Path | None = None) -> list[SourceFile]:
    """Files of the corpus, or one `split` of it, in order of name; `root` defaults to this Python's library.

    Raises `FileNotFoundError` if there are no sources, as in a zipped or compiled-only installation.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = [SourceFile(name, folder / name, split_of(name)) for name in sorted(_names(folder))]
    if not files:
        raise FileNotFoundError(
            f"no Python sources below {folder}: the corpus is the running interpreter's standard library, "
            "which must be installed as .py files"
        )
    return [file for file in files if split is None or file.split == split]


def iter_texts(split: Split, min_characters: int = 1) -> Iterator[str]:
    """Texts of the files of `split` with at least `min_characters` characters, in order of name."""
    for file in corpus_files(split):
        text = file.read()
        if len(text) >= min_characters:
            yield text


def corpus_digest(files: list[SourceFile]) -> str:
    """SHA-256 (hexadecimal) of the files' names, one per line: equal lists of files, equal digests."""
    return hashlib.sha256("".join(f"{file.name}\n" for file in files).encode()).hexdigest()


def _names(folder: Path) -> Iterator[str]:
    for parent, directories, filenames in os.walk(folder):
        # Pruned here, because installed packages may have far more files than the library itself.
        directories[:] = set(directories) - _SKIPPED_DIRECTORIES
        for filename in filenames:
            name = Path(parent, filename).relative_to(folder).as_posix()
            if name.endswith(".py") and not name.startswith(_GENERATED):
                yield name
