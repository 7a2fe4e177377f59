"""Bodies of responses, as in OpenAI's API."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse

from kvloom.integrations.transformers.session.choices.sampling import LogProb
from kvloom.integrations.transformers.session.requests.prompt import AgentTurn
from kvloom.serving.answers import Answers
from kvloom.serving.text import bytes_of, text_of

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_reply(status: int, message: str, code: str | None = None) -> JSONResponse:
    """Response with an error."""
    later = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse(error_body(status, message, code), status, later)


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
        **restored(answers.turn),
    }


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
