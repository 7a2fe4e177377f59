"""JSON and events of answers in OpenAI's API: text, tool calls, reasoning, log probabilities and usage."""

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvloom.integrations.transformers.session.choices.sampling import LogProb
from kvloom.integrations.transformers.session.requests.prompt import AgentTurn
from kvloom.serving.answering.answers import Answers, Piece
from kvloom.serving.protocol.readers import Reader, ReasoningText, ToolCall
from kvloom.serving.protocol.text import Echo, bytes_of, text_of
from kvloom.serving.protocol.wanted import Wanted


class EventStream:
    """Response of server-sent events, whose source is always closed at the end.

    Args:
        events: JSON objects; a ``type`` is also the name of the event.
        close: Function that closes their source; needed since a generator that never began does not.
        end: Bytes that are sent after them.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        close: Callable[[], None],
        end: bytes = b"data: [DONE]\n\n",
    ) -> None:
        self._events, self._close, self._end = events, close, end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with aclosing(self._events) as events:
                async for event in events:
                    name = f"event: {event['type']}\n" if "type" in event else ""
                    data = f"{name}data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._close()
        await send({"type": "http.response.body", "body": self._end, "more_body": False})


def usage(answers: Answers) -> dict[str, Any]:
    """``usage`` of a response: counts of tokens, and the state of an agent's session."""
    return {
        "prompt_tokens": answers.num_asked,
        "completion_tokens": answers.num_new,
        "total_tokens": answers.num_asked + answers.num_new,
        "prompt_tokens_details": {"cached_tokens": answers.num_found},
        **_predicted(answers),
        **restored(answers.turn),
    }


def _predicted(answers: Answers) -> dict[str, Any]:
    """The part of ``usage`` on drafted tokens, if there were any."""
    accepted, drafted = answers.num_accepted, answers.num_drafted
    if not drafted:
        return {}
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {"completion_tokens_details": details}


def restored(turn: AgentTurn | None) -> dict[str, Any]:
    """The part of ``usage`` on an agent's session: whether all of it was restored, and why not."""
    if turn is None:
        return {}
    kept = turn.num_kept or 0
    session = {
        "id": turn.name,
        "restored": 0 < kept == turn.num_restored,
        "kept_tokens": kept,
        "restored_tokens": turn.num_restored,
        "reason": turn.reason or None,
    }
    return {"session": session}


def chat_logprobs(tokenizer: Any, tokens: Sequence[int], logprobs: Sequence[LogProb]) -> dict[str, Any]:
    """``logprobs`` of a choice of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.decode([token]),
            "logprob": logprob,
            "bytes": list(bytes_of(tokenizer, token)),
        }

    return {
        "content": [
            {
                **entry(token, x.chosen),
                "top_logprobs": [entry(*pair) for pair in zip(x.tokens, x.logprobs, strict=True)],
            }
            for token, x in zip(tokens, logprobs, strict=True)
        ]
    }


def text_logprobs(
    tokenizer: Any, tokens: Sequence[int], logprobs: Sequence[LogProb | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """``logprobs`` of a choice of a completion, with ``offsets[i]`` characters of it before ``tokens[i]``.

    The first token of a prompt has none.
    """

    def likeliest(of: LogProb) -> dict[str, float]:
        return {text_of(tokenizer, token): value for token, value in zip(of.tokens, of.logprobs, strict=True)}

    return {
        "tokens": [text_of(tokenizer, token) for token in tokens],
        "token_logprobs": [None if x is None else x.chosen for x in logprobs],
        "top_logprobs": [None if x is None else likeliest(x) for x in logprobs],
        "text_offset": list(offsets),
    }


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
