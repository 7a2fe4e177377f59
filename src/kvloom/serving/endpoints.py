"""``/v1/chat/completions`` and ``/v1/completions``.

Chat templates, and what reads tool calls and reasoning from answers, are transformers' own.
"""

import gc
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    response_events_to_chunks,
)

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import summary_of
from kvloom.serving import Refused
from kvloom.serving.answers import Answers, Piece
from kvloom.serving.guard import TENANT
from kvloom.serving.messages import Chat
from kvloom.serving.prompts import expect_room
from kvloom.serving.replies import EventStream, chat_logprobs, error_body, text_logprobs, usage
from kvloom.serving.session import Place, Session
from kvloom.serving.wanted import Wanted

_USUAL_TOKENS: Final[Mapping[str, int | None]] = {"chat": None, "text": 16}
"""New tokens where a request does not say how many, as of OpenAI's: as many as there may be in a chat."""

_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""What a text may have that cannot be encoded."""


class Endpoint:
    """One of the two, on a session.

    Args:
        session: That answers.
        names: Of the model, the first of which is given out.
        kind: ``"chat"`` or ``"text"``.
    """

    def __init__(self, session: Session, names: tuple[str, ...], kind: str) -> None:
        self._session, self._names, self._kind = session, names, kind

    async def answer(self, request: Request) -> Any:
        """Answer one request; raises KVError for what it asks wrongly."""
        session, data = self._session, await request.body()
        if len(data) > session.max_body_bytes:
            raise Refused(
                413,
                f"the body must be at most {session.max_body_bytes} bytes, as the prompt must be at most "
                f"{session.room - 1} tokens, got {len(data)}",
            )
        with closing(Place(session)) as place:
            async with session.prompts.turn(len(data)) as read:
                body = await read(_read, data)
                wanted = Wanted.of(body, self._kind, session.model.generation_config)
                if body.get("model") not in (None, *self._names):
                    raise Refused(404, f"model must be {self._names[0]!r}, got {str(body['model'])[:100]!r}")
                place.widen(wanted.count)
                tokens, parsers = await read(self._prompt, body, wanted.count)
                del body
            tenant = request.scope.get(TENANT, "")
            # Who names nobody finds in a store what pools and sessions without a salt wrote.
            salt = json.dumps([tenant, wanted.salt]) if tenant or wanted.salt else ""
            name = f"{'chatcmpl' if self._kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
            answers = session.ask(
                name,
                tokens,
                wanted,
                salt,
                keep_special=parsers[0] is not None,
                usual_tokens=_USUAL_TOKENS[self._kind],
            )
        shapes = [_Shape(self._kind, parser) for parser in parsers]
        head = {
            "id": name,
            "created": int(time.time()),
            "model": self._names[0],
        }
        if wanted.stream:
            return EventStream(self._events(head, answers, wanted, shapes), answers.close)
        return JSONResponse(await self._whole(head, answers, wanted, shapes))

    def _prompt(self, body: dict[str, Any], count: int) -> tuple[list[int], list[Any]]:
        """Tokens of the prompt, and a parser of each answer, ``None`` without tools and reasoning."""
        session = self._session
        tokenizer, model = session.tokenizer, session.model
        if self._kind == "text":
            return self._text_tokens(body.get("prompt")), [None] * count
        if tokenizer.chat_template is None:
            raise ArgumentError(
                "messages need a chat template, which the model lacks: serve --chat-template F"
            )
        chat = Chat.of(body)
        try:
            chat.expect_read(tokenizer)
            text = tokenizer.apply_chat_template(
                chat.messages, add_generation_prompt=True, tools=chat.tools, tokenize=False, **chat.options
            )
            tokens = session.prompts.tokens_of(text, session.room, add_special_tokens=False)
            return tokens, [build_response_parser(tokenizer, model, tokens) for _ in range(count)]
        except ArgumentError:
            raise
        except Exception as error:  # whatever messages make a template, or what reads them, raise
            raise ArgumentError(
                f"messages must be what the model's chat template takes: {summary_of(error)}"
            ) from error

    def _text_tokens(self, prompt: Any) -> list[int]:
        session = self._session
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return session.prompts.tokens_of(prompt, session.room)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt[:1]):
            expect_room(session.room, len(prompt))
            if all(type(token) is int for token in prompt):
                return prompt
        raise ArgumentError("prompt must be one text, or a list of token ids")

    async def _whole(
        self, head: dict[str, Any], answers: Answers, wanted: Wanted, shapes: list["_Shape"]
    ) -> dict[str, Any]:
        async with aclosing(answers.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                shapes[piece.index].add(piece)
        tokenizer = self._session.tokenizer
        return {
            **head,
            "object": "chat.completion" if self._kind == "chat" else "text_completion",
            "choices": [shape.whole(i, tokenizer, wanted) for i, shape in enumerate(shapes)],
            "usage": usage(answers.num_asked, answers.num_new, answers.num_found),
        }

    async def _events(
        self, head: dict[str, Any], answers: Answers, wanted: Wanted, shapes: list["_Shape"]
    ) -> AsyncGenerator[dict[str, Any], None]:
        head["object"] = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        try:
            async with aclosing(answers.pieces()) as pieces:  # type: ignore[type-var]
                if self._kind == "chat":
                    for index in range(wanted.count):
                        delta = {"role": "assistant", "content": ""}
                        yield {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}
                async for piece in pieces:
                    for choice in shapes[piece.index].events(piece, self._session.tokenizer, wanted):
                        yield {**head, "choices": [choice]}
        except Refused as error:
            yield error_body(error.status, str(error))
            return
        if wanted.usage:
            counts = usage(answers.num_asked, answers.num_new, answers.num_found)
            yield {**head, "choices": [], "usage": counts}


class _Shape:
    """One answer as JSON: text, tool calls and reasoning, whole or in pieces."""

    def __init__(self, kind: str, parser: Any) -> None:
        self._kind, self._parser = kind, parser
        self._content, self._reasoning, self._calls = "", "", list[dict[str, Any]]()
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._logprobs: list[Any] = []
        self._finish: str | None = None
        self._pending = [] if parser is None else response_events_to_chunks(parser.initial_events)

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Take a piece; returns the deltas that it brings."""
        if piece.finish_reason is not None:
            self._finish = piece.finish_reason
        self._tokens += piece.tokens
        self._offsets += piece.offsets
        self._logprobs += piece.logprobs
        items: list[Any] = [piece.text] if piece.text else []
        if self._parser is not None:
            items = self._pending + (
                response_events_to_chunks(self._parser.feed(piece.text)) if piece.text else []
            )
            self._pending = []
            if piece.finish_reason is not None:
                try:
                    items += response_events_to_chunks(self._parser.finalize()[1])
                except (ValueError, RuntimeError):
                    pass  # it ended within a tool call
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
        """The choice of an answer that has ended."""
        choice: dict[str, Any] = {"index": index, "finish_reason": self._reason(), "logprobs": None}
        if wanted.logprobs is not None:
            choice["logprobs"] = self._as_logprobs(tokenizer, self._tokens, self._logprobs, self._offsets)
        if self._kind == "text":
            return {**choice, "text": self._content}
        message: dict[str, Any] = {"role": "assistant", "content": self._content}
        if self._calls:
            message["tool_calls"] = self._calls
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        return {**choice, "message": message}

    def events(self, piece: Piece, tokenizer: Any, wanted: Wanted) -> list[dict[str, Any]]:
        """Choices of the chunks for a piece."""
        deltas = self.add(piece)
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
        return "tool_calls" if self._calls else self._finish

    def _as_logprobs(self, tokenizer: Any, tokens: Any, logprobs: Any, offsets: Any) -> dict[str, Any]:
        if self._kind == "chat":
            return chat_logprobs(tokenizer, tokens, logprobs)
        return text_logprobs(tokenizer, tokens, logprobs, offsets)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for cycles, of which JSON has none: in a million lists it takes ten times as long as they."""
    was_enabled = gc.isenabled()  # of several threads the one that finds it enabled enables it again
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read(body: bytes) -> dict[str, Any]:
    """A JSON object whose texts can be encoded."""
    try:
        with _no_collection():
            value = json.loads(body.decode("utf-8-sig"))
        if _HALF_PAIR.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ArgumentError("the request must be JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise ArgumentError(f"the request must be a JSON object, got {type(value).__name__}")
    return value
