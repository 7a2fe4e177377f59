"""Bodies of errors, as in OpenAI's API."""

from typing import Any, Final

from starlette.responses import JSONResponse

_KINDS: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_reply(status: int, message: str, code: str | None = None) -> JSONResponse:
    """Response with an error."""
    later = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse(error_body(status, message, code), status, later)
