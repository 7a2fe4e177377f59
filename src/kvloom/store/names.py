"""Names of the objects of a store; objects with other names are never read or removed."""

import re
from enum import Enum
from typing import Final


class ObjectKind(Enum):
    """Kinds of objects, identified by their names."""

    RUN = "run"
    """Pages, in the folder of their fingerprint."""
    PROBE = "probe"
    """Results of the model of a folder."""
    INDEX = "index"
    """Heads of many runs of a folder."""
    MARK = "mark"
    """Mark of an evicted run."""
    QUARANTINED = "quarantined"
    """Damaged object."""


_FOLDER: Final = r"[0-9a-f]{16}"
_RUN: Final = r"[0-9a-f]{40}-\d{1,15}-\d{1,9}"
_NAMES: Final = {
    ObjectKind.RUN: re.compile(rf"{_FOLDER}/{_RUN}\.safetensors"),
    ObjectKind.PROBE: re.compile(rf"{_FOLDER}/probe"),
    ObjectKind.INDEX: re.compile(rf"{_FOLDER}/index-[0-9a-f]{{32}}"),
    ObjectKind.MARK: re.compile(rf"evicted/{_FOLDER}-{_RUN}"),
    ObjectKind.QUARANTINED: re.compile(rf"quarantine/{_FOLDER}-({_RUN}\.safetensors|index-[0-9a-f]{{32}})"),
}


def kind_of(name: str) -> ObjectKind | None:
    """Kind of an object; ``None`` if the name is not by kvloom."""
    return next((kind for kind, names in _NAMES.items() if names.fullmatch(name)), None)


def is_folder(name: str) -> bool:
    """Whether a name is that of a folder of a store."""
    return name in ("quarantine", "evicted") or bool(re.fullmatch(_FOLDER, name))


def folder_of(name: str) -> str:
    """Folder of an object."""
    return name.partition("/")[0]


def run_name(folder: str, digest: bytes, first: int, page_size: int) -> str:
    """Name of a run.

    Args:
        folder: Folder of its fingerprint.
        digest: Digest of the text up to the end of its last page.
        first: Position of its first token.
        page_size: Tokens in a page.
    """
    return f"{folder}/{digest.hex()[:40]}-{first}-{page_size}.safetensors"


def probe_name(folder: str) -> str:
    """Name of the probe of a folder."""
    return f"{folder}/probe"


def index_name(folder: str, digest: bytes) -> str:
    """Name of an index of a folder, by the 16-byte digest of its content."""
    return f"{folder}/index-{digest.hex()}"


def mark_name(run: str) -> str:
    """Name of the mark of an evicted run."""
    return f"evicted/{_flat(run.removesuffix('.safetensors'))}"


def quarantine_name(name: str) -> str:
    """Name of a damaged object in the quarantine."""
    return f"quarantine/{_flat(name)}"


def position_of(run: str) -> int:
    """Position of the first token of a run or a mark, by its name."""
    return int(run.rsplit("-", 2)[1])


def _flat(name: str) -> str:
    return name.replace("/", "-")
