"""Tools of a chat, and answers that must be tool calls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.serving.protocol.fields import flag, shown
from kvloom.serving.protocol.readers import ToolCall
from kvloom.serving.protocol.structured import JSON_OPTIONS, Structure, json_grammar, ll_matcher

_MOST_CALLS: Final = 16
"""Largest number of calls in one answer, since a small model would call forever."""


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """Tool calls that ``tool_choice`` forces.

    Attributes:
        name: Name of the function whose arguments are the answer; ``None`` if the answer is a list of calls.
        structure: Structure of the answer.
    """

    name: str | None
    structure: Structure

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ForcedCalls | None":
        """Read ``tool_choice``; ``None`` if the model decides.

        Args:
            given: Fields of a request that are not null.

        Raises:
            ArgumentError: the choice is invalid, or there is no such tool.
            UnsupportedError: llguidance is not installed.
        """
        choice, parallel = given.get("tool_choice", "auto"), flag(given, "parallel_tool_calls", True)
        forced = choice not in ("auto", "none")
        tools = tools_of(given, forced)
        if not forced:
            if not parallel and tools:
                raise ArgumentError(
                    "parallel_tool_calls must be left out unless tool_choice is 'required' or a function, "
                    "got False"
                )
            return None
        name = _named(choice)
        if not tools:
            raise ArgumentError(f"tool_choice must be left out without tools, got {shown(choice)}")
        for field in ("response_format", "structured_outputs", "min_tokens", "ignore_eos"):
            if given.get(field) not in (None, 0, {"type": "text"}):
                raise ArgumentError(f"{field} must be left out where tool_choice is {shown(choice)}")
        if name is None:
            return cls(None, _calls(tools, _MOST_CALLS if parallel else 1))
        for i, tool in enumerate(tools):
            if tool["function"]["name"] == name:
                return cls(name, json_grammar(f"tools[{i}].function.parameters", _parameters(tool)))
        known = ", ".join(tool["function"]["name"][:40] for tool in tools[:10])
        raise ArgumentError(f"tool_choice must name one of the tools, {known}, got {name[:40]!r}")


class CallsText:
    """Reader of an answer that must be tool calls, which are returned at its end.

    Args:
        calls: The forced calls.
    """

    keeps_special = False

    def __init__(self, calls: ForcedCalls) -> None:
        self._name, self._text = calls.name, ""

    def feed(self, text: str) -> list[Any]:
        """Keep the text until the end."""
        self._text += text
        return []

    def end(self) -> list[Any]:
        """The calls; incomplete arguments are returned unchanged, an incomplete list as text."""
        if self._name is not None:
            return [ToolCall(self._name, self._text)]
        try:
            calls = json.loads(self._text)
        except ValueError:
            return [self._text]
        return [ToolCall(x["name"], json.dumps(x["parameters"], ensure_ascii=False)) for x in calls]


def tools_of(body: Mapping[str, Any], forced: bool) -> list[dict[str, Any]]:
    """The tools of a request.

    Args:
        body: JSON object of the request.
        forced: Whether the answer must be tool calls, whose arguments then follow their schemas.

    Raises:
        ArgumentError: a tool is no function, or has an option that is not supported.
    """
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise ArgumentError(f"tools must be a list, got {shown(tools)}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or tool.get("type") != "function"
        ):
            raise ArgumentError(
                f"tools[{i}] must have type 'function' and a function with a name, got {shown(tool)}"
            )
        if function.get("strict") not in (None, False) and not forced:
            raise ArgumentError(
                f"tools[{i}].function.strict must be left out unless tool_choice is 'required' or a "
                f"function, got {shown(function['strict'])}"
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise ArgumentError(
                f"tools[{i}].function.parameters must be an object, got {shown(function['parameters'])}"
            )
    return tools


def _named(choice: Any) -> str | None:
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else 0
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return str(function["name"])
    raise ArgumentError(
        "tool_choice must be 'none', 'auto', 'required', or a function with its name, got " + shown(choice)
    )


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Schema of a tool's arguments, which are an object."""
    given = tool["function"].get("parameters")
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}


def _calls(tools: list[dict[str, Any]], most: int) -> Structure:
    """Structure of a list of calls; each schema is read alone, with its own definitions."""
    matcher = ll_matcher()
    more = f'(", " call){{0,{most - 1}}} ' if most > 1 else ""
    lines = [f'start: "[" call {more}"]"']
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["function"]["name"])}, "parameters": '
        try:
            schema = json.dumps({**_parameters(tool), "x-guidance": JSON_OPTIONS})
        except RecursionError as error:
            raise ArgumentError(f"tools[{i}].function.parameters must be a JSON schema: {error}") from error
        lines += [f'call_{i}: {json.dumps(head)} json_{i} "}}"', f"json_{i}: %json {schema}"]
    return Structure("tools", matcher.grammar_from_lark("\n".join(lines)))
