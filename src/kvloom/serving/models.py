"""The models of a server, and which of them a request asks."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from kvloom.errors import ArgumentError
from kvloom.serving import Refused
from kvloom.serving.bodies import read_object
from kvloom.serving.session import Place, Session

Answer = Callable[[Request], Awaitable[Any]]
"""Answers a request; raises KVError for what it asks wrongly."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served.

    Attributes:
        names: By which requests ask it, the first of which is given out.
        session: That answers.
    """

    names: tuple[str, ...]
    session: Session

    @property
    def name(self) -> str:
        """That is given out."""
        return self.names[0]


def chosen(name: object, models: Sequence[Model]) -> Model:
    """The model of a name; with one model, no name is needed.

    Raises:
        ArgumentError: there are several, and no name is said.
        Refused: none has the name.
    """
    if name is None and len(models) == 1:
        return models[0]
    listed = " or ".join(repr(model.name) for model in models)
    if not isinstance(name, str):
        raise ArgumentError(f"model must be {listed}, got {str(name)[:100]}")
    for model in models:
        if name in model.names:
            return model
    raise Refused(404, f"model must be {listed}, got {name[:100]!r}", "model_not_found")


def answer_of(models: Sequence[Model], make: Callable[[Session, tuple[str, ...]], Answer]) -> Answer:
    """The endpoint of all models: it reads which one a request names, and that one answers.

    Args:
        models: At least one.
        make: The endpoint of one, by its session and its names.
    """
    answers = {x.name: make(x.session, x.names) for x in models}
    if len(models) == 1:
        return answers[models[0].name]
    prompts = models[0].session.prompts

    async def answer(request: Request) -> Any:
        data = await request.body()
        # Whoever waits to be read has a place, where there is one, as those have who are answered.
        with closing(Place(min((x.session for x in models), key=lambda x: (not x.alive, x.num_taken)))):
            async with prompts.turn(len(data)) as read:
                body = await read(read_object, data)
        return await answers[chosen(body.get("model"), models).name](request)

    return answer
