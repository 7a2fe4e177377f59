"""Processes of targets that begin soon."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def prepared() -> Iterator[None]:
    """Within it, processes are copies of one that has imported torch, which takes more than a second."""
    given, context = multiprocessing.get_context, multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvloom.conform.isolation", "kvloom.conform.peers"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            multiprocessing, "get_context", lambda way=None: context if way == "spawn" else given(way)
        )
        yield
