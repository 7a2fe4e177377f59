"""Streaming of tokens to text, up to a stop; text and bytes of single tokens."""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

_UNKNOWN: Final = "\ufffd"
"""Character to which invalid bytes are decoded."""


class TextStream:
    """Text of one answer, in whole characters, up to the stop that is complete first.

    Args:
        tokenizer: Tokenizer with a ``backend_tokenizer``.
        stops: Texts before which the answer ends; they are not part of the text.
        skip_special_tokens: Whether to leave out special tokens.
        min_tokens: Number of tokens up to which a complete stop is ordinary text.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], skip_special_tokens: bool = True, min_tokens: int = 0
    ) -> None:
        self._min_tokens = min_tokens
        self._tokenizer, self._stops, self._skip = tokenizer, stops, skip_special_tokens
        self._decode = DecodeStream([], skip_special_tokens=skip_special_tokens)
        self._decoded = ""
        self._num_given = 0
        self.stopped = False
        """Whether a stop was found; no text follows then."""
        self.offsets: list[int] = []
        """Number of characters of the text, a stop included, before each token that was read."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Read more tokens, up to a stop; returns the new text that cannot change any more."""
        given = ""
        for token in tokens:
            if self.stopped:
                break
            start = len(self._decoded)
            self.offsets.append(start)
            self._decoded += self._decode.step(self._tokenizer.backend_tokenizer, token) or ""
            if len(self._decoded) > start:
                given += self._give(start, hold=True)
        return given

    def end(self, tokens: Sequence[int]) -> str:
        """The rest of the text, when no more tokens come; ``tokens`` are all tokens."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        start = len(self._decoded)
        if text.startswith(self._decoded):  # an incomplete character
            self._decoded = text
        return self._give(start, hold=False)

    def _give(self, start: int, hold: bool) -> str:
        if self.stopped:
            return ""
        text, end = self._decoded, len(self._decoded)
        stops = self._stops if len(self.offsets) > self._min_tokens else ()
        begins = [(stop, max(0, start - len(stop) + 1)) for stop in stops]  # a stop that ends after start
        found = [(at + len(stop), at) for stop, begin in begins if (at := text.find(stop, begin)) >= 0]
        if found:  # the stop that is complete first, however many tokens come at once
            end, self.stopped = min(found)[1], True
        elif hold:
            end -= max((_overlap(text, stop) for stop in self._stops), default=0)
        given, self._num_given = text[self._num_given : end], max(end, self._num_given)
        return given


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Echo(NamedTuple):
    """A prompt before an answer.

    Attributes:
        text: Its text.
        tokens: Its tokens.
        offsets: Number of characters of the text before each token.
    """

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Any, tokens: Sequence[int], text: str) -> "Echo":
        """Echo of a prompt. Leading tokens that are not in the text, such as special ones, have offset 0.

        Args:
            tokenizer: Tokenizer with a ``backend_tokenizer``.
            tokens: Tokens of the prompt.
            text: Text of the prompt.
        """
        stream = TextStream(tokenizer, (), skip_special_tokens=False)
        given = stream.feed(tokens) + stream.end(tokens)
        before = len(given) - len(text)
        return cls(text, tokens, [min(max(x - before, 0), len(text)) for x in stream.offsets])


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token, which may be a part of a character."""
    text: str = tokenizer.decode([token])
    if _UNKNOWN in text:
        name = tokenizer.convert_ids_to_tokens(token)
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes.fromhex(name[3:5])
        if all(x in _BYTES for x in name):
            return bytes(_BYTES[x] for x in name)
    return text.encode()


def text_of(tokenizer: Any, token: int) -> str:
    r"""The text of a token, or ``bytes:\xe2\x82`` of a part of a character."""
    given = bytes_of(tokenizer, token)
    try:
        return given.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{x:02x}" for x in given)


def _byte_alphabet() -> dict[str, int]:
    """Byte of each letter of byte-level vocabularies: printable letters are themselves, others in order."""
    letters = sorted(ByteLevel.alphabet())
    others = iter(sorted({*range(256)} - {*map(ord, letters)}))
    return {x: ord(x) if ord(x) < 256 else next(others) for x in letters}


_BYTES: Final = _byte_alphabet()
