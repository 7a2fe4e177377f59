"""Threads of a store, which do not keep the process alive."""

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger("kvloom.store")


def started(run: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that runs a function; ``None`` if the system has none left."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _LOG.warning("%s did not start: %s", name, error)
        return None
    return thread
