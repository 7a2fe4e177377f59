"""Reading of request bodies, which are JSON objects, and check of the model that they name."""

import gc
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.serving import Refused

_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escaped surrogate, which may be unpaired, so that the text cannot be encoded."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Context without garbage collection, which takes ten times as long as reading a million lists."""
    was_enabled = gc.isenabled()  # with several threads, the one that found it enabled enables it again
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
    """Raise Refused unless a request names the model with these names, or no model."""
    if body.get("model") not in (None, *names):
        told = f"model must be {names[0]!r}, got {str(body['model'])[:100]!r}"
        raise Refused(404, told, "model_not_found")
