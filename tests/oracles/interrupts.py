"""Ctrl-C at a chosen line of kvloom."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from typing import Any


def _press() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(
    at: int,
    call: Callable[[], object],
    interrupt: Callable[[], object] = _press,
    module: str = "kvloom",
    functions: Collection[str] = (),
) -> int:
    """Call with Ctrl-C at a line, counted from 1; the number of lines that ran.

    Args:
        at: Number of the line; none if 0.
        call: What is interrupted.
        interrupt: What happens at the line.
        module: What the names of the modules begin with whose lines are counted.
        functions: Names of the functions in them that count, with those that they call; all if empty.
    """
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        if event == "call":
            is_there = not functions or frame.f_code.co_name in functions or frame.f_back.f_trace is trace
            return trace if is_there and frame.f_globals.get("__name__", "").startswith(module) else None
        if event == "line":
            lines += 1
            if lines == at:
                interrupt()
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines
