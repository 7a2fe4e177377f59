"""Messages and tools of a chat, read from JSON, and a check that the model's chat template uses them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import jinja2.meta
from transformers.utils import chat_template_utils

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import summary_of
from kvloom.serving.protocol.fields import shown
from kvloom.serving.protocol.pictures import Picture, picture_of
from kvloom.serving.protocol.tools import tools_of

_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_OPTIONS: Final = ("enable_thinking",)

# Fields that only messages of one role may have.
_ROLES: Final = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}

# Names under which transformers passes an assistant's reasoning to a template.
_REASONING: Final = (
    "reasoning_content",
    *getattr(chat_template_utils, "_REASONING_FIELDS", ()),
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Arguments of a request for a chat template.

    Attributes:
        messages: Messages with the given fields. The content is one text, or parts for a model with vision;
            arguments of tool calls are objects.
        tools: Tools, or ``None``.
        options: Variables of the template.
        pictures: Pictures of all messages, in order.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, bool]
    pictures: Sequence[Picture] = ()

    @classmethod
    def of(cls, body: dict[str, Any], sees: bool = False) -> "Chat":
        """Read a request.

        Args:
            body: JSON object of the request.
            sees: Whether the model takes pictures.

        Raises:
            ArgumentError: a field is missing, unknown, or has an invalid value.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ArgumentError("messages must be a list of at least one message")
        options = body.get("chat_template_kwargs") or {}
        if (
            not isinstance(options, dict)
            or options.keys() - {*_OPTIONS}
            or not all(isinstance(value, bool) for value in options.values())
        ):
            raise ArgumentError(
                "chat_template_kwargs must be an object with enable_thinking alone, true or false"
            )
        choice = body.get("tool_choice") or "auto"
        tools = tools_of(body, choice not in ("auto", "none"))
        pictures: list[Picture] = []
        return cls(
            [_message(f"messages[{i}]", x, pictures if sees else None) for i, x in enumerate(messages)],
            tools if tools and choice != "none" else None,
            options,
            pictures,
        )

    def text(self, tokenizer: Any, add_generation_prompt: bool = True) -> str:
        """The text of the chat by the tokenizer's chat template.

        Args:
            tokenizer: Tokenizer with a template.
            add_generation_prompt: Whether an answer follows.

        Raises:
            ArgumentError: there is no template, or it raises, or it ignores a part of the request.
        """
        if tokenizer.chat_template is None:
            raise ArgumentError(
                "messages need a chat template, which the model does not have: serve --chat-template F"
            )
        try:
            self.expect_read(tokenizer)
            text = tokenizer.apply_chat_template(
                self.messages,
                add_generation_prompt=add_generation_prompt,
                tools=self.tools,
                tokenize=False,
                **self.options,
            )
        except ArgumentError:
            raise
        except Exception as error:  # whatever messages make a template raise
            raise ArgumentError(
                f"messages must be what the model's chat template takes: {summary_of(error)}"
            ) from error
        return str(text)

    def expect_read(self, tokenizer: Any) -> None:
        """Raise ArgumentError if the tokenizer's chat template ignores a part of the request.

        The template may ignore the reasoning of an assistant's message, and its text beside tool calls.
        Errors of the template are raised unchanged.
        """
        template = tokenizer.get_chat_template(tools=self.tools)
        variables = _variables(template)
        for name in ("tools" if self.tools else None, *self.options):
            if name is not None and name not in variables:
                raise ArgumentError(f"{name} must be left out, as the model's chat template does not read it")
        seen = [_Seen(message) for message in self.messages]
        _compiled(template).render(
            messages=seen,
            tools=self.tools,
            documents=None,
            add_generation_prompt=True,
            **{**tokenizer.special_tokens_map, **self.options},
        )
        for i, message in enumerate(seen):
            asked = {name for name, value in dict.items(message) if value}
            asked -= {"role", "tool_call_id", *_REASONING, *({"content"} if "tool_calls" in asked else ())}
            for name in sorted(asked - message.fields_read):
                role = self.messages[i]["role"]
                raise ArgumentError(
                    f"messages[{i}].{name} must be left out, as the model's chat template does not read it "
                    f"where the role is {role[:40]!r}"
                )


class _Seen(dict[str, Any]):
    """A message that records which of its fields are read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        aliases = dict.fromkeys(_REASONING, fields["reasoning_content"]) if _REASONING[0] in fields else {}
        super().__init__({**fields, **aliases})
        self.fields_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.fields_read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.fields_read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.fields_read.add(str(name))
        return super().__contains__(name)

    def _read_all(self) -> dict[str, Any]:
        fields = dict(super().items())
        self.fields_read.update(fields)
        return fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._read_all())

    def __repr__(self) -> str:
        return repr(self._read_all())

    def keys(self) -> Any:
        return self._read_all().keys()

    def values(self) -> Any:
        return self._read_all().values()

    def items(self) -> Any:
        return self._read_all().items()


def _compiled(template: str) -> Any:
    return chat_template_utils._compile_jinja_template(template)


@lru_cache(maxsize=8)
def _variables(template: str) -> set[str]:
    """Names of variables that a template reads and does not set itself."""
    return set(jinja2.meta.find_undeclared_variables(_compiled(template).environment.parse(template)))


def _message(name: str, message: Any, pictures: list[Picture] | None) -> dict[str, Any]:
    """A message for a template; its pictures are added to ``pictures``, ``None`` without vision."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ArgumentError(f"{name} must be an object with a role, got {shown(message)}")
    given = {field: value for field, value in message.items() if value not in (None, [])}
    for field in given:
        if field not in _FIELDS:
            raise ArgumentError(f"{name} must have fields that are supported, got {shown(field)}")
    for field in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(given.get(field, ""), str):
            raise ArgumentError(f"{name}.{field} must be a string, got {shown(given[field])}")
    for field, role in _ROLES.items():
        if field in given and given["role"] != role:
            raise ArgumentError(f"{name}.{field} must be in messages of role {role!r} alone")
    if "tool_calls" in given:
        given["tool_calls"] = _calls(f"{name}.tool_calls", given["tool_calls"])
    if "content" in given:
        given["content"] = _content(f"{name}.content", given["content"], pictures)
    elif "tool_calls" not in given:
        raise ArgumentError(f"{name}.content must be a text, or parts of type 'text', got none")
    return {"content": "" if pictures is None else [], **given}


def _content(name: str, content: Any, pictures: list[Picture] | None) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content if pictures is None else [{"type": "text", "text": content}]
    kinds = "'text'" if pictures is None else "'text' or 'image_url'"
    if not isinstance(content, list):
        raise ArgumentError(f"{name} must be a text, or parts of type {kinds}, got {shown(content)}")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind == "image_url" and pictures is not None:
            pictures.append(picture_of(f"{name}[{i}]", part))
            parts.append({"type": "image"})
        elif kind != "text":
            raise ArgumentError(f"{name}[{i}] must be a part of type {kinds}, got {shown(kind)}")
        elif part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ArgumentError(f"{name}[{i}] must have a type and a text alone, got {shown(part)}")
        else:
            parts.append({"type": "text", "text": part["text"]})
    return " ".join(part["text"] for part in parts) if pictures is None else parts


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, which templates iterate over."""
    if not isinstance(calls, list):
        raise ArgumentError(f"{name} must be a list, got {shown(calls)}")
    made = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ArgumentError(f"{name}[{i}] must have a function with a name, got {shown(call)}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                pass
        if not isinstance(arguments, dict):
            raise ArgumentError(
                f"{name}[{i}].function.arguments must be a JSON object, got {shown(arguments)}"
            )
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made
