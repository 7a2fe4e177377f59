"""``kvloom serve``: an HTTP server for OpenAI's clients, on sessions of continuous batching.

Importing this package imports neither torch nor the packages that a server needs.
"""

from importlib.util import find_spec
from typing import Final

from kvloom.errors import KVError, UnsupportedError

__all__ = ["PACKAGES", "Refused", "expect_installed"]

PACKAGES: Final = ("transformers", "starlette", "uvicorn", "prometheus_client")
"""Packages that a server needs beside torch."""


class Refused(KVError):
    """Error that answers a request.

    Args:
        status: HTTP status.
        message: One sentence.
        code: Code that tells it from other errors with this status, or ``None``.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def expect_installed(names: tuple[str, ...] = PACKAGES) -> None:
    """Raise UnsupportedError, with the command that installs them, unless all packages are installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"this needs {', '.join(missing)}: pip install {' '.join(missing)}")
