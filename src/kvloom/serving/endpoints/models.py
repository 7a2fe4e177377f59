"""Models of a server, and the choice of the model that a request names."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from kvloom.errors import ArgumentError
from kvloom.serving import Refused
from kvloom.serving.answering.session import Place, ServingSession
from kvloom.serving.protocol.fields import read_object

Answer = Callable[[Request], Awaitable[Any]]
"""Function that answers a request; raises KVError if the request is invalid."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a server.

    Attributes:
        names: Names that requests may use; responses have the first one.
        session: Session that answers.
    """

    names: tuple[str, ...]
    session: ServingSession

    @property
    def name(self) -> str:
        """Name in responses."""
        return self.names[0]


def chosen(name: object, models: Sequence[Model]) -> Model:
    """The model with a name; ``None`` is allowed if there is only one model.

    Raises:
        ArgumentError: there are several models, and no name is given.
        Refused: no model has the name.
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


def answer_of(models: Sequence[Model], make: Callable[[ServingSession, tuple[str, ...]], Answer]) -> Answer:
    """The endpoint of all models, which passes a request to the model that it names.

    Args:
        models: At least one model.
        make: Function that makes the endpoint of one model, from its session and names.
    """
    answers = {x.name: make(x.session, x.names) for x in models}
    if len(models) == 1:
        return answers[models[0].name]
    prompts = models[0].session.prompts

    async def answer(request: Request) -> Any:
        data = await request.body()
        # A request that waits to be read takes a place, like those that are answered.
        with closing(Place(min((x.session for x in models), key=lambda x: (not x.alive, x.num_taken)))):
            async with prompts.turn(len(data)) as read:
                body = await read(read_object, data)
        return await answers[chosen(body.get("model"), models).name](request)

    return answer
