"""Sessions of agents over HTTP: a request names its session in a header; clients list and delete sessions."""

import re
from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.session.requests.agent_sessions import AgentReport
from kvloom.integrations.transformers.session.requests.prompt import AgentTurn
from kvloom.serving import Refused
from kvloom.serving.endpoints.models import Model
from kvloom.serving.guard import TENANT

HEADER: Final = "X-Session-Id"

_ID: Final = re.compile(r"[A-Za-z0-9._~:-]{1,128}")


def turn_of(request: Request, num_answers: int) -> AgentTurn | None:
    """The turn of a request in the session that it names; ``None`` without a name.

    Args:
        request: The request, whose headers are read.
        num_answers: Number of answers to all its prompts.

    Raises:
        ArgumentError: the name is invalid, or there are several answers.
    """
    names = request.headers.getlist(HEADER)
    if not names:
        return None
    if len(names) > 1 or _ID.fullmatch(names[0]) is None:
        raise ArgumentError(
            f"{HEADER} must be one id of 1 to 128 ASCII letters, digits and any of ._~:-, "
            f"got {', '.join(names)[:200]!r}"
        )
    if num_answers != 1:
        raise ArgumentError(f"n and prompt must ask for one answer with {HEADER}, got {num_answers} answers")
    return AgentTurn(request.scope.get(TENANT, ""), names[0])


class Agents:
    """Endpoints ``/v1/sessions``: sessions of agents that belong to one key, in all models.

    Args:
        models: Models of the server.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models

    async def every(self, request: Request) -> JSONResponse:
        """List all sessions, the longest unused first."""
        found = self._found(request)
        data = [_described(model, report) for model, report in sorted(found, key=lambda x: x[1].used)]
        return JSONResponse({"object": "list", "data": data})

    async def one(self, request: Request) -> JSONResponse:
        """Show the session in the path, or delete it and release its pages.

        With several models each may have a session of this name: the last used is shown, and all are deleted.
        """
        name, owner = request.path_params["id"], request.scope.get(TENANT, "")
        found = [x for x in self._found(request) if x[1].name == name]
        if not found:
            raise Refused(404, f"there is no session {name[:128]!r}", "session_not_found")
        if request.method != "DELETE":
            return JSONResponse(_described(*max(found, key=lambda x: x[1].used)))
        for model, _ in found:
            model.session.manager.agents.forget(owner, name)
        return JSONResponse({"id": name, "object": "session.deleted", "deleted": True})

    def _found(self, request: Request) -> list[tuple[Model, AgentReport]]:
        owner = request.scope.get(TENANT, "")
        return [
            (model, report) for model in self._models for report in model.session.manager.agents.report(owner)
        ]


def _described(model: Model, report: AgentReport) -> dict[str, Any]:
    return {
        "id": report.name,
        "object": "session",
        "model": model.name,
        "tokens": report.num_tokens,
        "held": report.is_held,
        "reason": report.reason or None,
        "created_at": int(report.began),
        "used_at": int(report.used),
        "expires_at": int(report.expires),
    }
