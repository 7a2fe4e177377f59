"""Endpoint ``/v1/responses``: a chat in OpenAI's newer format, without stored responses."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvloom.errors import ArgumentError
from kvloom.serving import Refused
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints.asking import Asking, BegunAnswers
from kvloom.serving.endpoints.response_items import Output
from kvloom.serving.endpoints.shapes import EventStream, restored
from kvloom.serving.protocol.response_request import chat_of, own_names


class Responses:
    """The endpoint, on a session.

    Args:
        session: Session that answers.
        names: Names of the model; responses have the first one.
    """

    def __init__(self, session: ServingSession, names: tuple[str, ...]) -> None:
        self._session, self._names = session, names
        self._asking = Asking(session, names, "chat", "resp")

    async def answer(self, request: Request) -> Any:
        """Answer one request; raises KVError if the request is invalid."""
        said: dict[str, Any] = {}

        def translated(body: dict[str, Any]) -> dict[str, Any]:
            chat = chat_of(body, self._session.pictures is not None)
            said.update((name, body.get(name)) for name in ("instructions", "metadata", "text", "user"))
            return chat

        try:
            begun = await self._asking.begin(request, translated)
        except ArgumentError as error:
            raise ArgumentError(own_names(str(error))) from error
        response = _Response(begun, self._names[0], said)
        if begun.wanted.stream:
            return EventStream(_told(response), begun.answers.close, end=b"")
        async with aclosing(response.events()) as events:
            async for event in events:
                last = event
        return JSONResponse(last["response"])


class _Response:
    """One response, and its events.

    Args:
        begun: Its answer.
        model: Name of the model.
        said: Fields of the request that the response repeats.
    """

    def __init__(self, begun: BegunAnswers, model: str, said: dict[str, Any]) -> None:
        self._begun, self._output = begun, Output()
        self._num_reasoning, self._created = 0, int(time.time())
        sampling = begun.wanted.sampling
        self._fields = {
            "model": model,
            "instructions": said["instructions"],
            "metadata": said["metadata"] or {},
            "text": said["text"] or {"format": {"type": "text"}},
            "user": said["user"],
            "max_output_tokens": begun.wanted.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "background": False,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """All events; raises Refused if the answer fails."""
        yield self.event("response.created", "in_progress")
        yield self.event("response.in_progress", "in_progress")
        reader, answers, output = self._begun.readers[0], self._begun.answers, self._output
        reason = None
        async with aclosing(answers.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                for item in reader.feed(piece.text):
                    for event in output.add(item):
                        yield event
                if output.kind == "reasoning":
                    self._num_reasoning += len(piece.tokens)
                reason = piece.finish_reason
        for item in reader.end():
            for event in output.add(item):
                yield event
        status = "incomplete" if reason == "length" else "completed"
        for event in output.end(is_whole=status == "completed"):
            yield event
        yield self.event(f"response.{status}", status)

    def event(self, kind: str, status: str, failure: str | None = None) -> dict[str, Any]:
        """An event with the present response."""
        answers, is_over = self._begun.answers, status != "in_progress"
        usage = {
            "input_tokens": answers.num_asked,
            "input_tokens_details": {"cached_tokens": answers.num_found, "cache_write_tokens": 0},
            "output_tokens": answers.num_new,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": answers.num_asked + answers.num_new,
            **restored(answers.turn),
        }
        response = {
            "id": self._begun.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None if failure is None else {"code": "server_error", "message": failure},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [*self._output.items] if is_over else [],
            "usage": usage if is_over else None,
            **self._fields,
        }
        return {"type": kind, "response": response}


async def _told(response: _Response) -> AsyncGenerator[dict[str, Any], None]:
    """Numbered events of a response; the last one is ``response.failed`` if the answer fails."""
    number = 0
    try:
        async with aclosing(response.events()) as events:
            async for event in events:
                yield {**event, "sequence_number": number}
                number += 1
    except Refused as error:
        failed = response.event("response.failed", "failed", str(error))
        yield {**failed, "sequence_number": number}
