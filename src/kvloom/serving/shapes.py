"""JSON of one answer in OpenAI's API: text, tool calls and reasoning, whole or in pieces."""

import uuid
from dataclasses import replace
from typing import Any

from kvloom.serving.answers import Piece
from kvloom.serving.readers import Reader, ReasoningText, ToolCall
from kvloom.serving.replies import chat_logprobs, text_logprobs
from kvloom.serving.text import Echo
from kvloom.serving.wanted import Wanted


class AnswerShape:
    """JSON of one answer: text, tool calls and reasoning, whole or in pieces.

    Args:
        kind: ``"chat"`` or ``"text"``.
        reader: Reader of tool calls and reasoning in the text.
        echo: The prompt with which its log probabilities begin; ``None`` for none.
    """

    def __init__(self, kind: str, reader: Reader, echo: Echo | None = None) -> None:
        self._kind, self.reader, self._echo = kind, reader, echo
        self._content, self._reasoning, self._calls = "", "", list[dict[str, Any]]()
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._logprobs: list[Any] = []
        self._finish: str | None = None

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece; returns its deltas."""
        return self._add(self._with_echo(piece))

    def _with_echo(self, piece: Piece) -> Piece:
        """A piece of the answer, changed to a piece of the text that begins with the prompt."""
        echo = self._echo
        if echo is None:
            return piece
        offsets = tuple(len(echo.text) + x for x in piece.offsets)
        if self._tokens:
            return replace(piece, offsets=offsets)
        return replace(
            piece,
            tokens=(*echo.tokens, *piece.tokens),
            offsets=(*echo.offsets, *offsets),
            logprobs=(None, *piece.prompt_logprobs, *piece.logprobs),
        )

    def _add(self, piece: Piece) -> list[dict[str, Any]]:
        self._tokens += piece.tokens
        self._offsets += piece.offsets
        self._logprobs += piece.logprobs
        items = self.reader.feed(piece.text)
        if piece.finish_reason is not None:
            self._finish = piece.finish_reason
            items += self.reader.end()
        return [self._delta(item) for item in items]

    def _delta(self, item: Any) -> dict[str, Any]:
        if isinstance(item, ToolCall):
            call = {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
        if isinstance(item, ReasoningText):
            self._reasoning += item
            return {"reasoning_content": str(item)}
        self._content += item
        return {"content": item}

    def whole(self, index: int, tokenizer: Any, wanted: Wanted) -> dict[str, Any]:
        """Choice of a whole response, for an answer that has ended."""
        choice: dict[str, Any] = {"index": index, "finish_reason": self._reason(), "logprobs": None}
        if wanted.logprobs is not None:
            choice["logprobs"] = self._as_logprobs(tokenizer, self._tokens, self._logprobs, self._offsets)
        if self._kind == "text":
            return {**choice, "text": self._content}
        content = self._content or (None if self._calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._calls:
            message["tool_calls"] = self._calls
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        return {**choice, "message": message}

    def events(self, piece: Piece, tokenizer: Any, wanted: Wanted) -> list[dict[str, Any]]:
        """Choices of the chunks of a streamed response, for a piece."""
        piece = self._with_echo(piece)
        deltas = self._add(piece)
        empty: dict[str, Any] = {} if self._kind == "chat" else {"content": ""}
        if piece.finish_reason is not None or (wanted.logprobs is not None and not deltas):
            deltas.append(empty)
        choices: list[dict[str, Any]] = [
            {"index": piece.index, "finish_reason": None, "logprobs": None}
            | ({"delta": delta} if self._kind == "chat" else {"text": delta["content"]})
            for delta in deltas
        ]
        if choices and wanted.logprobs is not None:
            choices[0]["logprobs"] = self._as_logprobs(tokenizer, piece.tokens, piece.logprobs, piece.offsets)
        if piece.finish_reason is not None:
            choices[-1]["finish_reason"] = self._reason()
        return choices

    def _reason(self) -> str | None:
        return "tool_calls" if self._calls and self._finish == "stop" else self._finish

    def _as_logprobs(self, tokenizer: Any, tokens: Any, logprobs: Any, offsets: Any) -> dict[str, Any]:
        if self._kind == "chat":
            return chat_logprobs(tokenizer, tokens, logprobs)
        return text_logprobs(tokenizer, tokens, logprobs, offsets)
