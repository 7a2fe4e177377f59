"""Beginning the answers to a request: its body is read, tokenized in threads, and passed to the session.

Chat templates, and the parsers of tool calls and reasoning in answers, are those of transformers.
"""

import json
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from starlette.requests import Request

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import summary_of
from kvloom.integrations.transformers.session.config import expect_known
from kvloom.serving import Refused
from kvloom.serving.access_log import ENTRY, LogEntry
from kvloom.serving.answering.answers import Answers
from kvloom.serving.answering.prompts import expect_room
from kvloom.serving.answering.session import Place, ServingSession
from kvloom.serving.answering.vision import PicturePrompt
from kvloom.serving.endpoints.agents import HEADER, turn_of
from kvloom.serving.guard import TENANT
from kvloom.serving.protocol.fields import expect_model, read_object
from kvloom.serving.protocol.messages import Chat
from kvloom.serving.protocol.pictures import decoded
from kvloom.serving.protocol.readers import PlainText, Reader, reader_of
from kvloom.serving.protocol.text import Echo
from kvloom.serving.protocol.tools import CallsText
from kvloom.serving.protocol.wanted import Wanted

_USUAL_TOKENS: Final = 16
"""Default number of new tokens of a completion, as in OpenAI's API; a chat has as many as possible."""

_PROMPTS: Final = "prompt must be a text, a list of token ids, or a list of those"


@dataclass(frozen=True, slots=True)
class BegunAnswers:
    """Answers that have begun.

    Attributes:
        name: Id of the first answer, and of the whole response for the client.
        wanted: Parameters of the request.
        answers: The answers, to be read or closed.
        readers: Reader of each answer.
        echoes: For each answer, the prompt with which its log probabilities begin; ``None`` for none.
    """

    name: str
    wanted: Wanted
    answers: Answers
    readers: list[Reader]
    echoes: list[Echo | None]


class Asking:
    """Starter of the answers to requests of one kind.

    Args:
        session: Session that answers.
        names: Names of the model.
        kind: ``"chat"`` or ``"text"``.
        prefix: Prefix of the ids of answers.
    """

    def __init__(self, session: ServingSession, names: tuple[str, ...], kind: str, prefix: str) -> None:
        self._session, self._names, self._kind, self._prefix = session, names, kind, prefix

    async def begin(
        self, request: Request, translate: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    ) -> BegunAnswers:
        """Begin the answers to a request.

        Args:
            request: The request, whose body has not been read.
            translate: Function from the request's body to a body of this kind, called in a thread.

        Raises:
            KVError: the request is invalid, or there is no room for it.
        """
        session, data = self._session, await request.body()
        if len(data) > session.max_body_bytes:
            raise Refused(
                413,
                f"the body must be at most {session.max_body_bytes} bytes, as the prompt must be at most "
                f"{session.room - 1} tokens, got {len(data)}",
            )
        with closing(Place(session)) as place:
            async with session.prompts.turn(len(data)) as read:
                body = await read(lambda: translate(read_object(data)))
                wanted = Wanted.of(body, self._kind, session.model.generation_config)
                expect_model(body, self._names)
                prompts = [body] if self._kind == "chat" else _texts(body.get("prompt"))
                turn = turn_of(request, wanted.count * len(prompts))
                place.widen(wanted.count * len(prompts))
                asked: list[_Asked] = [await read(self._asked, prompt, wanted) for prompt in prompts]
                if turn is not None and asked[0].pictures is not None:
                    raise ArgumentError(
                        f"{HEADER} must be left out in a chat with pictures, which no session keeps"
                    )
                matcher = None
                if wanted.structure is not None:
                    matcher = await read(session.grammars.matcher, wanted.structure)
                del body, prompts
            tenant = request.scope.get(TENANT, "")
            # Without tenant and salt, pages of pools and sessions without a salt are found in a store.
            salt = json.dumps([tenant, wanted.salt]) if tenant or wanted.salt else ""
            name = f"{self._prefix}-{uuid.uuid4().hex}"
            readers = [reader for x in asked for reader in x.readers]
            answers = session.ask(
                name,
                [x.tokens for x in asked],
                wanted,
                salt,
                keep_special=readers[0].keeps_special,
                usual_tokens=None if self._kind == "chat" else _USUAL_TOKENS,
                matcher=matcher,
                turn=turn,
                pictures=asked[0].pictures,
            )
        request.scope.get(ENTRY, LogEntry()).answers = answers
        return BegunAnswers(name, wanted, answers, readers, [x.echo for x in asked for _ in x.readers])

    def _asked(self, prompt: Any, wanted: Wanted) -> "_Asked":
        """Tokens and readers for one prompt of a completion, or for the body of a chat."""
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
        text, echo = "", None
        if wanted.echo and tokens:
            expect_known("the prompt", tokens, session.model)
            text = prompt if isinstance(prompt, str) else session.tokenizer.decode(tokens)
            if wanted.logprobs is not None:
                echo = Echo.of(session.tokenizer, tokens, text)
        return _Asked(tokens, [PlainText(text) for _ in range(wanted.count)], echo=echo)

    def _chat(self, body: dict[str, Any], wanted: Wanted) -> "_Asked":
        session = self._session
        sees = session.pictures
        chat = Chat.of(body, sees is not None)
        text, pictures = chat.text(session.tokenizer), None
        room = sees.room if sees is not None and chat.pictures else session.room
        tokens = session.prompts.tokens_of(text, room, add_special_tokens=False)
        if sees is not None and chat.pictures:
            pictures = sees.vision.prompt_of(text, chat.messages, decoded(chat.pictures))
            tokens = pictures.tokens
        return _Asked(tokens, [self._reader(wanted, tokens) for _ in range(wanted.count)], pictures)

    def _reader(self, wanted: Wanted, tokens: list[int]) -> Reader:
        """Reader of an answer to a chat; an answer with a structure is read as plain text."""
        if wanted.calls is not None:
            return CallsText(wanted.calls)
        if wanted.structure is not None:
            return PlainText()
        try:
            return reader_of(self._session.tokenizer, self._session.model, tokens)
        except Exception as error:  # whatever a response template raises
            raise ArgumentError(
                f"messages must be what the model's response template reads: {summary_of(error)}"
            ) from error


class _Asked(NamedTuple):
    """Tokens of a prompt, readers of its answers, its pictures if any, and its echo if it is scored."""

    tokens: list[int]
    readers: list[Reader]
    pictures: PicturePrompt | None = None
    echo: Echo | None = None


def _texts(prompt: Any) -> list[Any]:
    """The prompts of a completion, each a text or what may be a list of token ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and type(next(iter(prompt), None)) is int):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(x, str | list) for x in prompt):
        return prompt
    raise ArgumentError(_PROMPTS)
