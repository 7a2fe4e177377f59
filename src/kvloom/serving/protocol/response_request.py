"""Translation of a request of ``/v1/responses`` to a chat."""

import re
from collections.abc import Mapping
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.serving.protocol.fields import read_fields, shown, text
from kvloom.serving.protocol.sampling import SAMPLING_FIELDS

_SAME: Final = (
    *SAMPLING_FIELDS,
    "model",
    "stream",
    "metadata",
    "user",
    "cache_salt",
    "chat_template_kwargs",
)
_OTHERS: Final = ("input", "instructions", "max_output_tokens", "text", *_SAME)

# Fields with the values that change nothing. OpenAI's server stores responses by default.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "include": ([],),
    "parallel_tool_calls": (True, False),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_OWN_NAMES: Final = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
}
_PARTS: Final = ("input_text", "output_text", "text")
_IMAGE: Final = "input_image"
_MESSAGE: Final = ("type", "role", "content", "id", "status")


def chat_of(body: Mapping[str, Any], sees: bool = False) -> dict[str, Any]:
    """The body of a chat for a request of ``/v1/responses``.

    Args:
        body: JSON object of the request.
        sees: Whether the model takes pictures.

    Raises:
        ArgumentError: a field is unknown, not supported, or has an invalid value.
    """
    given = read_fields(body, _OTHERS, _NEUTRAL)
    chat: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    chat["messages"] = _messages(given, (*_PARTS, _IMAGE) if sees else _PARTS)
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    asked = given.get("text", {})
    if not isinstance(asked, dict) or asked.keys() - {"format"}:
        raise ArgumentError(f"text must be an object with a format alone, got {shown(asked)}")
    if asked.get("format") is not None:
        chat["response_format"] = _format(asked["format"])
    return chat


def own_names(message: str) -> str:
    """Error message of a chat, with the names of fields in a request of ``/v1/responses``."""
    for name, own in _OWN_NAMES.items():
        message = re.sub(rf"(?<!['\w]){re.escape(name)}(?!\w)", own, message)
    return message


def _format(value: Any) -> Any:
    """``response_format`` for ``text.format``, in which a schema is not nested."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in value.items() if k != "type"}}
    return value


def _messages(given: Mapping[str, Any], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Messages of a chat; ``kinds`` are the allowed types of their parts."""
    asked = given.get("input")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise ArgumentError(
            f"input must be a text, or a list of at least one message, got {shown(given.get('input'))}"
        )
    messages: list[dict[str, Any]] = []
    if text(given, "instructions"):
        messages.append({"role": "system", "content": given["instructions"]})
    reasoning = ""
    for i, item in enumerate(asked):
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if kind == "reasoning":
            reasoning += "".join(x["text"] for x in _parts(f"input[{i}]", item, ("reasoning_text",)))
        elif kind == "message":
            message = _message(f"input[{i}]", item, kinds)
            if reasoning and message["role"] == "assistant":
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        else:
            raise ArgumentError(
                f"input[{i}] must be a message, or the reasoning before one, got {shown(kind)}"
            )
    if reasoning:
        raise ArgumentError("input must have a message of the assistant after its reasoning, got none")
    return messages


def _message(name: str, item: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    for field, value in item.items():
        if field not in _MESSAGE and value is not None:
            raise ArgumentError(f"{name} must have fields that are supported, got {shown(field)}")
    if not isinstance(item.get("role"), str):
        raise ArgumentError(f"{name} must have a role, got {shown(item.get('role'))}")
    if isinstance(item.get("content"), str):
        return {"role": item["role"], "content": item["content"]}
    return {"role": item["role"], "content": _parts(name, item, kinds)}


def _parts(name: str, item: dict[str, Any], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Parts in the form of a chat."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise ArgumentError(f"{name}.content must be a text or a list of parts, got {shown(content)}")
    parts: list[dict[str, Any]] = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in kinds:
            known = " or ".join(map(repr, kinds))
            raise ArgumentError(f"{name}.content[{j}] must be a part of type {known}, got {shown(kind)}")
        if kind == _IMAGE:
            parts.append(_image(f"{name}.content[{j}]", part))
        elif isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise ArgumentError(f"{name}.content[{j}].text must be a string, got {shown(part.get('text'))}")
    return parts


def _image(name: str, part: dict[str, Any]) -> dict[str, Any]:
    given = {field: value for field, value in part.items() if value is not None}
    if given.keys() - {"detail"} != {"type", "image_url"}:
        raise ArgumentError(f"{name} must have a type, an image_url and a detail alone, got {shown(part)}")
    image = {"url": given["image_url"], "detail": given.get("detail", "auto")}
    return {"type": "image_url", "image_url": image}
