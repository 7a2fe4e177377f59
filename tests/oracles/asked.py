"""How many pages of texts the prefix trees are asked for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvloom.paging.nodes import Nodes


class Asked:
    """Counts the pages of each walk through a tree."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.walks = list[int]()
        find = Nodes.find

        def count(nodes: Nodes, pages: Iterable[bytes], salt: str, above: int | None = None) -> list[int]:
            pages = [*pages]
            self.walks.append(len(pages))
            return find(nodes, pages, salt, above)

        monkeypatch.setattr(Nodes, "find", count)
