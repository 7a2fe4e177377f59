"""Versions of transformers that are supported: the last of 4, and those from 5.19 on.

Importing this refuses all others, so it is imported before what only these have.
"""

from typing import Final

import transformers
from packaging.version import Version

from kvloom.errors import UnsupportedError

LAST_OF_4: Final = "4.57.6"
OLDEST: Final = "5.19.0"
"""The oldest supported version with sessions of continuous batching."""


def expect_supported(version: str) -> None:
    """Raise UnsupportedError for a version of transformers that is not supported."""
    release = Version(version).release
    is_last_of_4 = Version(LAST_OF_4).release <= release < (5,)
    if not is_last_of_4 and release < Version(OLDEST).release:
        raise UnsupportedError(f"transformers must be {LAST_OF_4}, or {OLDEST} or newer, got {version}")


expect_supported(transformers.__version__)

IS_4: Final = Version(transformers.__version__).release < (5,)
"""Whether it is the last of 4, which has no such sessions."""
