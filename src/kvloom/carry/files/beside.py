"""What a format has no place for: a small file beside a cache, with the model's digest and the tokens."""

import json
import os
from pathlib import Path
from typing import Final, NamedTuple

from kvloom.carry.files.writing import written_whole
from kvloom.errors import ArgumentError

_SUFFIX: Final = ".carried.json"
DIGEST: Final = "kvloom"
"""Name of the model's digest, here and in the metadata of files that have some."""


class Beside(NamedTuple):
    """What is said beside a file.

    Attributes:
        digest: ``model_digest`` of the model that computed it.
        tokens: Ids of its tokens; ``None`` if unknown.
    """

    digest: str
    tokens: tuple[int, ...] | None = None


def path_beside(path: str | os.PathLike[str]) -> Path:
    """Path of the file beside a cache."""
    return Path(f"{os.fspath(path)}{_SUFFIX}")


def write_beside(path: str | os.PathLike[str], said: Beside) -> None:
    """Write the file beside a cache; raises OSError if it cannot be written."""
    with written_whole(path_beside(path)) as file:
        file.write(json.dumps({DIGEST: said.digest, "tokens": said.tokens}).encode())


def read_beside(path: str | os.PathLike[str]) -> Beside | None:
    """What is said beside a cache; ``None`` if nothing is.

    Raises:
        ArgumentError: the file beside it is damaged.
    """
    beside = path_beside(path)
    try:
        found = json.loads(beside.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{beside} must be JSON: {error}") from error
    tokens = found.get("tokens") if isinstance(found, dict) else ()
    are_ids = isinstance(tokens, list) and all(type(x) is int for x in tokens)
    if (tokens is not None and not are_ids) or not isinstance(found.get(DIGEST), str):
        raise ArgumentError(f"{beside} must have a digest and a list of tokens")
    return Beside(found[DIGEST], None if tokens is None else tuple(tokens))


def expect_digest(said: str, model: str) -> None:
    """Raise ArgumentError unless a cache is of a model, by their digests."""
    if said != model:
        raise ArgumentError(
            f"model must be that which computed the cache, with digest {said[:16]}, got {model[:16]}"
        )
