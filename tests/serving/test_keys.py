"""Keys of near digests are different keys."""

from __future__ import annotations

import hashlib
from itertools import count

from oracles.serving import served


def test_a_key_is_compared_by_its_whole_digest() -> None:
    """Keys whose digests have a byte in common, whichever, are different keys."""

    def digest(key: str) -> bytes:
        return hashlib.sha256(key.encode()).digest()

    with served(api_keys=("right",)) as server:
        for place in (0, 15, 31):
            near = next(key for key in map(str, count()) if digest(key)[place] == digest("right")[place])
            assert server.send("GET", "/v1/models", Authorization=f"Bearer {near}")[0] == 401
        assert server.send("GET", "/v1/models", Authorization="Bearer right")[0] == 200
