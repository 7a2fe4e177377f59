"""Readers that split the text of an answer into text, reasoning and tool calls, piece by piece."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    get_response_template,
    response_events_to_chunks,
)

__all__ = ["ParsedText", "PlainText", "Reader", "ReasoningText", "ToolCall", "reader_of"]


class Reader(Protocol):
    """Reader of one answer.

    Attributes:
        keeps_special: Whether the text must have special tokens.
    """

    keeps_special: bool

    def feed(self, text: str) -> list[Any]:
        """Items of the next piece: texts, ``ReasoningText`` and ``ToolCall``."""

    def end(self) -> list[Any]:
        """Items at the end of the answer."""


class PlainText:
    """Reader that returns the text unchanged.

    Args:
        before: Text before the answer.
    """

    keeps_special = False

    def __init__(self, before: str = "") -> None:
        self._before = before

    def feed(self, text: str) -> list[Any]:
        """Return the text, and before it the given text."""
        before, self._before = self._before, ""
        return [x for x in (before, text) if x]

    def end(self) -> list[Any]:
        """No more items."""
        return []


class ParsedText:
    """Reader by a parser of transformers, which follows the model's response template.

    Args:
        parser: The parser.
    """

    keeps_special = True

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._first = response_events_to_chunks(parser.initial_events)

    def feed(self, text: str) -> list[Any]:
        """Items that the parser finds in the next piece."""
        first, self._first = self._first, []
        return [*first, *(response_events_to_chunks(self._parser.feed(text)) if text else [])]

    def end(self) -> list[Any]:
        """Items that the parser finds at the end."""
        try:
            items: list[Any] = response_events_to_chunks(self._parser.finalize()[1])
        except (ValueError, RuntimeError):
            return []  # it ended within a tool call
        return items


def reader_of(tokenizer: Any, model: Any, tokens: list[int]) -> Reader:
    """Reader of an answer to a chat, by the response template of its tokenizer or model.

    A template that says where answers begin is not that of a prompt without such a place, as of DeepSeek's
    models that are Qwen's with another chat template: its parser would take the prompt for the answer. Such
    an answer is read as plain text.

    Args:
        tokenizer, model: Those of the session.
        tokens: Tokens of the prompt.
    """
    template = get_response_template(tokenizer, model)
    parser = build_response_parser(tokenizer, model, tokens)
    if parser is None or not _has_beginning(template, tokenizer.decode(tokens)):
        return PlainText()
    return ParsedText(parser)


def _has_beginning(template: Mapping[str, Any], prompt: str) -> bool:
    """Whether a prompt has the place where an answer begins, if a response template names one."""
    literals, pattern = template.get("start_anchor"), template.get("start_anchor_pattern")
    if literals is not None:
        return any(x in prompt for x in ([literals] if isinstance(literals, str) else literals))
    return pattern is None or re.search(pattern, prompt, re.DOTALL) is not None
