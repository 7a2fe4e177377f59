"""``kvloom serve``: an HTTP server that OpenAI's clients understand, on sessions of continuous batching.

Importing this imports no torch and none of the packages that a server needs.
"""

from importlib.util import find_spec
from typing import Final

from kvloom.errors import KVError, UnsupportedError

__all__ = ["PACKAGES", "Refused", "expect_installed"]

PACKAGES: Final = ("transformers", "starlette", "uvicorn", "prometheus_client")
"""What a server needs beside torch."""


class Refused(KVError):
    """A request that is answered by an error.

    Args:
        status: Of HTTP.
        message: One sentence.
        code: By which clients tell it from others of its status, if there is one.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def expect_installed(names: tuple[str, ...] = PACKAGES) -> None:
    """Raise UnsupportedError, with the command that helps, unless all packages are there."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"this needs {', '.join(missing)}: pip install {' '.join(missing)}")
