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
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers.cli.serving.utils import build_response_parser

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import summary_of
from kvloom.integrations.transformers.batching.config import expect_known
from kvloom.serving import Refused
from kvloom.serving.answers import Answers
from kvloom.serving.guard import TENANT
from kvloom.serving.messages import Chat
from kvloom.serving.prompts import expect_room
from kvloom.serving.readers import ParsedText, PlainText, Reader
from kvloom.serving.replies import EventStream, error_body, usage
from kvloom.serving.session import Place, Session
from kvloom.serving.shapes import Shape
from kvloom.serving.tools import CallsText
from kvloom.serving.wanted import Wanted

_USUAL_TOKENS: Final[Mapping[str, int | None]] = {"chat": None, "text": 16}
"""New tokens where a request does not say how many, as of OpenAI's: as many as there may be in a chat."""

_PROMPTS: Final = "prompt must be a text, a list of token ids, or a list of those"

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
                prompts = [body] if self._kind == "chat" else _texts(body.get("prompt"))
                place.widen(wanted.count * len(prompts))
                asked = [await read(self._asked, prompt, wanted) for prompt in prompts]
                matcher = None
                if wanted.structure is not None:
                    matcher = await read(session.grammars.matcher, wanted.structure)
                del body, prompts
            tenant = request.scope.get(TENANT, "")
            # Who names nobody finds in a store what pools and sessions without a salt wrote.
            salt = json.dumps([tenant, wanted.salt]) if tenant or wanted.salt else ""
            name = f"{'chatcmpl' if self._kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
            answers = session.ask(
                name,
                [x.tokens for x in asked],
                wanted,
                salt,
                keep_special=asked[0].shapes[0].reader.keeps_special,
                usual_tokens=_USUAL_TOKENS[self._kind],
                matcher=matcher,
            )
        shapes = [shape for x in asked for shape in x.shapes]
        head = {
            "id": name,
            "created": int(time.time()),
            "model": self._names[0],
        }
        if wanted.stream:
            return EventStream(self._events(head, answers, wanted, shapes), answers.close)
        return JSONResponse(await self._whole(head, answers, wanted, shapes))

    def _asked(self, prompt: Any, wanted: Wanted) -> "_Asked":
        """One prompt of a request, or the body of a chat, as tokens."""
        if self._kind == "chat":
            return self._chat(prompt, wanted)
        session = self._session
        tokens = prompt
        if isinstance(prompt, str):
            tokens = session.prompts.tokens_of(prompt, session.room)
        else:
            expect_room(session.room, len(prompt))
            if not all(type(token) is int for token in prompt):
                raise ArgumentError(_PROMPTS)
        echo = ""
        if wanted.echo and tokens:
            expect_known("the prompt", tokens, session.model)
            echo = prompt if isinstance(prompt, str) else session.tokenizer.decode(tokens)
        return _Asked(tokens, [Shape("text", PlainText(echo)) for _ in range(wanted.count)])

    def _chat(self, body: dict[str, Any], wanted: Wanted) -> "_Asked":
        session = self._session
        tokenizer, model = session.tokenizer, session.model
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
            shapes = [
                Shape("chat", _reader(wanted, build_response_parser(tokenizer, model, tokens)))
                for _ in range(wanted.count)
            ]
        except ArgumentError:
            raise
        except Exception as error:  # whatever messages make a template, or what reads them, raise
            raise ArgumentError(
                f"messages must be what the model's chat template takes: {summary_of(error)}"
            ) from error
        return _Asked(tokens, shapes)

    async def _whole(
        self, head: dict[str, Any], answers: Answers, wanted: Wanted, shapes: list[Shape]
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
        self, head: dict[str, Any], answers: Answers, wanted: Wanted, shapes: list[Shape]
    ) -> AsyncGenerator[dict[str, Any], None]:
        head["object"] = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        try:
            async with aclosing(answers.pieces()) as pieces:  # type: ignore[type-var]
                if self._kind == "chat":
                    for index in range(len(shapes)):
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """Tokens of a prompt, and what the answers to it become."""

    tokens: list[int]
    shapes: list[Shape]


def _reader(wanted: Wanted, parser: Any) -> Reader:
    """Of a chat; an answer with a structure has it from its first letter on."""
    if wanted.calls is not None:
        return CallsText(wanted.calls)
    return PlainText() if parser is None or wanted.structure is not None else ParsedText(parser)


def _texts(prompt: Any) -> list[Any]:
    """The prompts of a completion, each a text or what may be a list of token ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and type(next(iter(prompt), None)) is int):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(x, str | list) for x in prompt):
        return prompt
    raise ArgumentError(_PROMPTS)


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
