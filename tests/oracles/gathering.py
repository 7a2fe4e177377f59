"""Attention by torch over gathered tokens, on the CPU, where nothing takes it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from kvloom.ops.gathered import attention as gathered


@contextmanager
def gathering(least_rows: int = 1, most_bytes: int = gathered.MOST_BYTES) -> Iterator[list[Tensor]]:
    """Sequences of ``least_rows`` query rows of a head are gathered; yields the queries of each call."""
    calls: list[Tensor] = []

    def counted(attend: Any) -> Any:
        def call(query: Tensor, *arguments: Any) -> Any:
            calls.append(query)
            return attend(query, *arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered, "DEVICES", ["cuda", "cpu"])
        patch.setattr(gathered, "LEAST_ROWS", least_rows)
        patch.setattr(gathered, "MOST_BYTES", most_bytes)
        for name in ("attend", "attend_part"):
            patch.setattr(gathered, name, counted(getattr(gathered, name)))
        yield calls
