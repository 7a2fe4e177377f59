"""Tokens to text as they come, up to a text that ends the answer."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one answer, whole characters only, up to the stop that is whole first.

    Args:
        tokenizer: With a ``backend_tokenizer``.
        stops: Texts before which the answer ends; none of them is given out.
        skip_special_tokens: Leave out the tokens that are no text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._stops, self._skip = tokenizer, stops, skip_special_tokens
        self._decode = DecodeStream([], skip_special_tokens=skip_special_tokens)
        self._decoded = ""
        self._num_given = 0
        self.stopped = False
        """Whether a stop was found; nothing comes after it."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain now, after some more tokens."""
        start = len(self._decoded)
        for token in tokens:
            self._decoded += self._decode.step(self._tokenizer.backend_tokenizer, token) or ""
        if len(self._decoded) == start:
            return ""
        return self._give(start, hold=True)

    def end(self, tokens: Sequence[int]) -> str:
        """The rest, where no more tokens come; ``tokens`` are all of them."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        start = len(self._decoded)
        if text.startswith(self._decoded):  # a character that is not whole
            self._decoded = text
        return self._give(start, hold=False)

    def _give(self, start: int, hold: bool) -> str:
        if self.stopped:
            return ""
        text, end = self._decoded, len(self._decoded)
        longest = max(map(len, self._stops), default=1)
        begin = max(0, start - longest + 1)
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop, begin)) >= 0]
        if found:  # the one that is whole first, however many tokens come at once
            end, self.stopped = min(found)[1], True
        elif hold:
            end -= max((_overlap(text, stop) for stop in self._stops), default=0)
        given, self._num_given = text[self._num_given : end], max(end, self._num_given)
        return given


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
