"""What groups of layers have of a text."""

from collections.abc import Sequence
from functools import cached_property

from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.core.text import Text
from kvloom.paging import TreePath


class Found:
    """What each of some groups has of a text, by one walk through its tree. Valid until a tree changes.

    Args:
        groups: The groups, with pages of one size.
        tokens: Token ids from the start of the text.
        scope: Key of the text in the trees.
        pages: The tokens as of ``PrefixTree.packed``, if they are known.

    Attributes:
        tokens: As above, with what stores compute of them.
        scope: As above.
        pages: Tokens of each full page, packed once.
        paths: Pages of each group, as far as its tree knows the text.

    Raises:
        ArgumentError: a token is no signed 64-bit integer.
    """

    def __init__(
        self,
        groups: Sequence[PrefixGroup],
        tokens: Sequence[int],
        scope: str,
        pages: list[bytes] | None = None,
    ) -> None:
        self._groups, self.tokens, self.scope = groups, Text.of(tokens), scope
        self.pages = groups[0].tree.packed(tokens) if pages is None else pages
        self.paths: list[TreePath] = [group.tree.walk(self.pages, scope) for group in groups]

    def again(self) -> "Found":
        """The same text, after trees changed."""
        return Found(self._groups, self.tokens, self.scope, self.pages)

    @cached_property
    def there(self) -> list[list[bool]]:
        """Whether each group has each page, as far as all groups know the text."""
        num_pages = min(len(path.pages) for path in self.paths)
        return [[page >= 0 for page in path.pages[:num_pages]] for path in self.paths]

    def fewest(self, there: Sequence[Sequence[bool]]) -> list[int]:
        """``PrefixTree.fewest`` for all groups, given which pages each has."""
        every = [group.tree.fewest(pages) for group, pages in zip(self._groups, there, strict=True)]
        return every[0] if len(every) == 1 else [max(page) for page in zip(*every, strict=True)]

    @cached_property
    def fewest_there(self) -> list[int]:
        """``fewest`` for the pages that are there."""
        return self.fewest(self.there)

    def longest(self, fewest: Sequence[int], limit: int | None = None) -> int:
        """Number of pages of the longest complete prefix, given ``fewest``, of at most ``limit`` pages."""
        size = self._groups[0].tree.page_size
        pages = range(len(fewest) if limit is None else min(len(fewest), limit), 0, -1)
        return next((i for i in pages if fewest[i - 1] <= i * size), 0)
