"""Ctrl-C at a chosen line of kvloom."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any


def interrupted(at: int, call: Callable[[], object]) -> int:
    """Call with Ctrl-C at a line, counted from 1; the number of lines that ran."""
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        if event == "call":
            return trace if frame.f_globals.get("__name__", "").startswith("kvloom") else None
        if event == "line":
            lines += 1
            if lines == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines
