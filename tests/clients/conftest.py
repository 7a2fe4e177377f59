"""One ``kvloom serve``, in a process of its own, that all clients ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvloom.integrations.transformers.versions import IS_4

KEY = "KEY1"

if IS_4:
    collect_ignore = ["test_server.py"]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Of the API of a server of the bundled model, whose key is ``KEY1``."""
    from oracles.serving import started

    with started("--kv", "int8", "--pages", "512", KVLOOM_API_KEY=KEY) as (found, _):
        yield found
