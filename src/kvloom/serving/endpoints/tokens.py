"""Endpoints ``/tokenize`` and ``/detokenize``, as in vLLM's server."""

from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.session.config import expect_known
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.protocol.fields import expect_model, flag, read_fields, read_object, shown
from kvloom.serving.protocol.messages import Chat
from kvloom.serving.protocol.text import text_of
from kvloom.serving.settings import MOST

_COMMON: Final = ("model", "add_special_tokens", "return_token_strs")
_TEXT: Final = (*_COMMON, "prompt")
_CHAT: Final = (*_COMMON, "messages", "tools", "chat_template_kwargs", "add_generation_prompt")


class TokenEndpoints:
    """Both endpoints, in the threads that read prompts; a text may be longer than the model can read.

    Args:
        session: Session with the tokenizer.
        names: Names of the model.
    """

    def __init__(self, session: ServingSession, names: tuple[str, ...]) -> None:
        self._session, self._names = session, names

    async def tokenize(self, request: Request) -> JSONResponse:
        """Answer ``/tokenize``; raises KVError if the request is invalid."""
        return await self._answer(request, self._tokens_of)

    async def detokenize(self, request: Request) -> JSONResponse:
        """Answer ``/detokenize``; raises KVError if the request is invalid."""
        return await self._answer(request, self._text_of)

    async def _answer(
        self, request: Request, made: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> JSONResponse:
        data = await request.body()
        async with self._session.prompts.turn(len(data)) as read:
            return JSONResponse(await read(self._made, data, made))

    def _made(self, data: bytes, made: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        body = read_object(data)
        expect_model(body, self._names)
        return made(body)

    def _tokens_of(self, body: dict[str, Any]) -> dict[str, Any]:
        session, is_chat = self._session, body.get("messages") is not None
        body = read_fields(body, _CHAT if is_chat else _TEXT)
        if is_chat:
            chat = Chat.of(body, session.pictures is not None)
            if chat.pictures:
                raise ArgumentError(
                    f"{chat.pictures[0].name} must be left out here, where text alone is read"
                )
            text = chat.text(session.tokenizer, flag(body, "add_generation_prompt", True))
        elif isinstance(body.get("prompt"), str):
            text = body["prompt"]
        else:
            raise ArgumentError(f"prompt must be a text, got {shown(body.get('prompt'))}")
        special = flag(body, "add_special_tokens", not is_chat)
        tokens = session.prompts.tokens_of(text, MOST, add_special_tokens=special)
        strings = {}
        if flag(body, "return_token_strs"):
            strings = {"token_strs": [text_of(session.tokenizer, token) for token in tokens]}
        return {"count": len(tokens), "max_model_len": session.room, "tokens": tokens, **strings}

    def _text_of(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = read_fields(body, ("model", "tokens")).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ArgumentError(f"tokens must be a list of token ids, got {shown(tokens)}")
        if tokens:
            expect_known("tokens", tokens, self._session.model)
        return {"prompt": self._session.tokenizer.decode(tokens)}
