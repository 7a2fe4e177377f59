"""Who is let in where nearly everything is right: other sites of this machine, and keys of near digests."""

from __future__ import annotations

import hashlib
from itertools import count

import pytest
from oracles.serving import served
from starlette.datastructures import Headers

from kvloom.serving.guard import _is_from_here


@pytest.mark.parametrize(
    ("site", "is_let_in"),
    [("none", True), ("same-origin", True), ("same-site", False), ("cross-site", False), ("", False)],
)
def test_pages_of_another_port_of_this_machine_are_another_site(site: str, is_let_in: bool) -> None:
    """A page of ``http://localhost:3000`` is of the same site as the server, and of another origin."""
    headers = {"Host": "localhost:8000", "Sec-Fetch-Site": site}
    assert _is_from_here(Headers(headers)) is is_let_in
    with served() as server:
        assert server.send("GET", "/v1/models", **headers)[0] == (200 if is_let_in else 403)


def test_a_key_is_compared_by_its_whole_digest() -> None:
    """Keys whose digests have a byte in common, whichever, are different keys."""

    def digest(key: str) -> bytes:
        return hashlib.sha256(key.encode()).digest()

    with served(api_keys=("right",)) as server:
        for place in (0, 15, 31):
            near = next(key for key in map(str, count()) if digest(key)[place] == digest("right")[place])
            assert server.send("GET", "/v1/models", Authorization=f"Bearer {near}")[0] == 401
        assert server.send("GET", "/v1/models", Authorization="Bearer right")[0] == 200
