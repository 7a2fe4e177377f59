"""The build backend: scikit-build-core's, which also requires torch where none is installed."""

from collections.abc import Callable
from typing import Any

from find_torch import find_torch
from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 (the hooks)

Hook = Callable[[dict[str, Any] | None], list[str]]


def _and_torch(hook: Hook) -> Hook:
    return lambda settings=None: [*hook(settings), *([] if find_torch() else ["torch>=2.10"])]


get_requires_for_build_wheel = _and_torch(build.get_requires_for_build_wheel)
get_requires_for_build_editable = _and_torch(build.get_requires_for_build_editable)
