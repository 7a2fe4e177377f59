"""Endpoints ``/v1/chat/completions`` and ``/v1/completions``, as in OpenAI's API."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvloom.serving import Refused
from kvloom.serving.answering.answers import Answers
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints.asking import Asking
from kvloom.serving.endpoints.shapes import AnswerShape, EventStream, usage
from kvloom.serving.protocol.wanted import Wanted
from kvloom.serving.refusals import error_body


class Endpoint:
    """One of the two endpoints, on a session.

    Args:
        session: Session that answers.
        names: Names of the model; responses have the first one.
        kind: ``"chat"`` or ``"text"``.
    """

    def __init__(self, session: ServingSession, names: tuple[str, ...], kind: str) -> None:
        self._session, self._names, self._kind = session, names, kind
        self._asking = Asking(session, names, kind, "chatcmpl" if kind == "chat" else "cmpl")

    async def answer(self, request: Request) -> Any:
        """Answer one request; raises KVError if the request is invalid."""
        begun = await self._asking.begin(request)
        wanted, answers = begun.wanted, begun.answers
        shapes = [AnswerShape(self._kind, *x) for x in zip(begun.readers, begun.echoes, strict=True)]
        head = {
            "id": begun.name,
            "created": int(time.time()),
            "model": self._names[0],
        }
        if wanted.stream:
            return EventStream(self._events(head, answers, wanted, shapes), answers.close)
        return JSONResponse(await self._whole(head, answers, wanted, shapes))

    async def _whole(
        self, head: dict[str, Any], answers: Answers, wanted: Wanted, shapes: list[AnswerShape]
    ) -> dict[str, Any]:
        async with aclosing(answers.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                shapes[piece.index].add(piece)
        tokenizer = self._session.tokenizer
        return {
            **head,
            "object": "chat.completion" if self._kind == "chat" else "text_completion",
            "choices": [shape.whole(i, tokenizer, wanted) for i, shape in enumerate(shapes)],
            "usage": usage(answers),
        }

    async def _events(
        self, head: dict[str, Any], answers: Answers, wanted: Wanted, shapes: list[AnswerShape]
    ) -> AsyncGenerator[dict[str, Any], None]:
        head["object"] = "chat.completion.chunk" if self._kind == "chat" else "text_completion"

        def chunk(choice: dict[str, Any]) -> dict[str, Any]:
            running = {"usage": usage(answers)} if wanted.running_usage else {}
            return {**head, "choices": [choice], **running}

        try:
            async with aclosing(answers.pieces()) as pieces:  # type: ignore[type-var]
                if self._kind == "chat":
                    for index in range(len(shapes)):
                        delta = {"role": "assistant", "content": ""}
                        yield chunk({"index": index, "delta": delta, "finish_reason": None})
                async for piece in pieces:
                    for choice in shapes[piece.index].events(piece, self._session.tokenizer, wanted):
                        yield chunk(choice)
        except Refused as error:
            yield error_body(error.status, str(error), error.code)
            return
        if wanted.usage:
            yield {**head, "choices": [], "usage": usage(answers)}
