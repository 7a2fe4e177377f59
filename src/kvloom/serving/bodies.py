"""Bodies of requests: JSON objects, and the model that they name."""

import gc
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.serving import Refused

_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""What a text may have that cannot be encoded."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for cycles, of which JSON has none: in a million lists it takes ten times as long as they."""
    was_enabled = gc.isenabled()  # of several threads the one that finds it enabled enables it again
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object whose texts can be encoded; raises ArgumentError for anything else."""
    try:
        with _no_collection():
            value = json.loads(body.decode("utf-8-sig"))
        if _HALF_PAIR.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ArgumentError("the request must be JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise ArgumentError(f"the request must be a JSON object, got {type(value).__name__}")
    return value


def expect_model(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise Refused unless a request is for the model that has these names, or says nothing of it."""
    if body.get("model") not in (None, *names):
        told = f"model must be {names[0]!r}, got {str(body['model'])[:100]!r}"
        raise Refused(404, told, "model_not_found")
