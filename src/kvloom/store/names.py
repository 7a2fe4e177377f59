"""Names of the objects of a store: nothing else beside them is ever read or removed."""

import re
from enum import Enum
from typing import Final


class Kind(Enum):
    """Kinds of objects, by their names."""

    RUN = "run"
    """Pages, in the folder of their fingerprint."""
    PROBE = "probe"
    """What the model of a folder computes."""
    INDEX = "index"
    """What many heads of a folder say."""
    MARK = "mark"
    """What is left of a run that limits removed."""
    QUARANTINED = "quarantined"
    """An object that is damaged."""


_FOLDER: Final = r"[0-9a-f]{16}"
_RUN: Final = r"[0-9a-f]{40}-\d{1,15}-\d{1,9}"
_NAMES: Final = {
    Kind.RUN: re.compile(rf"{_FOLDER}/{_RUN}\.safetensors"),
    Kind.PROBE: re.compile(rf"{_FOLDER}/probe"),
    Kind.INDEX: re.compile(rf"{_FOLDER}/index-[0-9a-f]{{32}}"),
    Kind.MARK: re.compile(rf"evicted/{_FOLDER}-{_RUN}"),
    Kind.QUARANTINED: re.compile(rf"quarantine/{_FOLDER}-({_RUN}\.safetensors|index-[0-9a-f]{{32}})"),
}


def kind_of(name: str) -> Kind | None:
    """The kind of an object; ``None`` if kvloom gives nothing such a name."""
    return next((kind for kind, names in _NAMES.items() if names.fullmatch(name)), None)


def is_folder(name: str) -> bool:
    """Whether kvloom gives a folder of a store such a name."""
    return name in ("quarantine", "evicted") or bool(re.fullmatch(_FOLDER, name))


def folder_of(name: str) -> str:
    """The folder that an object lies in."""
    return name.partition("/")[0]


def run_name(folder: str, digest: bytes, first: int, page_size: int) -> str:
    """The name of a run.

    Args:
        folder: Of its fingerprint.
        digest: Of the text up to the end of its last page.
        first: Position of its first token.
        page_size: Tokens in a page.
    """
    return f"{folder}/{digest.hex()[:40]}-{first}-{page_size}.safetensors"


def probe_name(folder: str) -> str:
    """The name of the probe of a folder."""
    return f"{folder}/probe"


def index_name(folder: str, digest: bytes) -> str:
    """The name of an index of a folder, whose content has this digest of 16 bytes."""
    return f"{folder}/index-{digest.hex()}"


def mark_name(run: str) -> str:
    """The name of the mark of an evicted run."""
    return f"evicted/{_flat(run.removesuffix('.safetensors'))}"


def quarantine_name(name: str) -> str:
    """Under which a damaged object is kept."""
    return f"quarantine/{_flat(name)}"


def position_of(run: str) -> int:
    """Position of the first token of a run or a mark, by its name."""
    return int(run.rsplit("-", 2)[1])


def _flat(name: str) -> str:
    return name.replace("/", "-")
