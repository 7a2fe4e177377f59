"""What the text of an answer is made of: text, reasoning and tool calls, as pieces of it come."""

from typing import Any, Protocol

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

__all__ = ["ParsedText", "PlainText", "Reader", "ReasoningText", "ToolCall"]


class Reader(Protocol):
    """Reads one answer.

    Attributes:
        keeps_special: Whether special tokens must be in the text.
    """

    keeps_special: bool

    def feed(self, text: str) -> list[Any]:
        """What a piece brings: texts, ``ReasoningText`` and ``ToolCall``."""

    def end(self) -> list[Any]:
        """What the end of an answer brings."""


class PlainText:
    """Text alone.

    Args:
        before: Text before the answer.
    """

    keeps_special = False

    def __init__(self, before: str = "") -> None:
        self._before = before

    def feed(self, text: str) -> list[Any]:
        """As of ``Reader``."""
        before, self._before = self._before, ""
        return [x for x in (before, text) if x]

    def end(self) -> list[Any]:
        """As of ``Reader``."""
        return []


class ParsedText:
    """What a parser of transformers finds, by the model's response template.

    Args:
        parser: The parser.
    """

    keeps_special = True

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._first = response_events_to_chunks(parser.initial_events)

    def feed(self, text: str) -> list[Any]:
        """As of ``Reader``."""
        first, self._first = self._first, []
        return [*first, *(response_events_to_chunks(self._parser.feed(text)) if text else [])]

    def end(self) -> list[Any]:
        """As of ``Reader``."""
        try:
            items: list[Any] = response_events_to_chunks(self._parser.finalize()[1])
        except (ValueError, RuntimeError):
            return []  # it ended within a tool call
        return items
