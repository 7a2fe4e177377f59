"""What tests do that a quick loop leaves out: Pythons that start, and functions that torch compiles."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_done: list[str] = []
_compiled = [0]
"""Graphs, when ``done`` was asked last."""


def watch() -> None:
    """Note from now on what starts."""
    _note(subprocess.Popen, "__init__", lambda self, args, *_, **__: args if _starts_python(args) else None)
    _note(BaseProcess, "start", lambda self: self.name)
    _note(os, "fork", lambda: "os.fork")


def _starts_python(args: Any) -> bool:
    """Whether a command starts a Python; ``platform`` asks ``file`` what one is, and starts none."""
    return "python" in str(args) and (isinstance(args, str | bytes) or str(args[0]) != "file")


def _note(owner: Any, name: str, describe: Callable[..., object]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        what = describe(*args, **kwargs)
        if what is not None:  # libraries ask uname and the like, once in a process
            _done.append(f"the process {what}"[:200])
        return function(*args, **kwargs)

    setattr(owner, name, noting)


def done() -> list[str]:
    """What has been done since this was asked last."""
    found = _done[:]
    _done.clear()
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    num_compiled = 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
    if num_compiled > _compiled[0]:
        found.append(f"{num_compiled - _compiled[0]} graphs")
    _compiled[0] = num_compiled
    return found
