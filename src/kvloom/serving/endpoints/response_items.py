"""Output items of a response (messages, reasoning and calls), and the events by which clients build them."""

import uuid
from typing import Any

from kvloom.serving.protocol.readers import ReasoningText, ToolCall

_TEXTS = {
    "message": ("msg", "output_text", "response.output_text"),
    "reasoning": ("rs", "reasoning_text", "response.reasoning_text"),
}


class Output:
    """Builder of the output of one response.

    Attributes:
        items: Items so far.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    @property
    def kind(self) -> str:
        """Kind of the item that is being built; empty between items."""
        return str(self.items[-1]["type"]) if self._is_open else ""

    def add(self, item: Any) -> list[dict[str, Any]]:
        """Add a text, ``ReasoningText`` or ``ToolCall``; returns its events."""
        if isinstance(item, ToolCall):
            return [*self.close(), *self._call(item)]
        kind = "reasoning" if isinstance(item, ReasoningText) else "message"
        events = [] if self.kind == kind else [*self.close(), *self._open(kind)]
        self.items[-1]["content"][0]["text"] += item
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"{_TEXTS[kind][2]}.delta", content_index=0, delta=str(item), **extra)]

    def end(self, is_whole: bool) -> list[dict[str, Any]]:
        """End the output, which gets a message if it is empty; ``is_whole`` is false if it was cut."""
        events = [] if self.items else self._open("message")
        return [*events, *self.close("completed" if is_whole else "incomplete")]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is being built, if any; returns its events."""
        if not self._is_open:
            return []
        self._is_open, item = False, self.items[-1]
        _, _, name = _TEXTS[item["type"]]
        part = item["content"][0]
        item["status"] = status
        extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return [
            self._event(f"{name}.done", content_index=0, text=part["text"], **extra),
            self._event("response.content_part.done", content_index=0, part=dict(part)),
            self._whole("response.output_item.done"),
        ]

    def _open(self, kind: str) -> list[dict[str, Any]]:
        prefix, name, _ = _TEXTS[kind]
        part: dict[str, Any] = {"type": name, "text": ""}
        item: dict[str, Any] = {"type": kind, "id": _new(prefix), "status": "in_progress", "content": []}
        if kind == "message":
            item["role"] = "assistant"
            part["annotations"] = []
        else:
            item["summary"] = []
        self.items.append(item)
        added = self._whole("response.output_item.added")
        item["content"], self._is_open = [part], True
        return [added, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        item = {
            "type": "function_call",
            "id": _new("fc"),
            "call_id": _new("call"),
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        added = self._whole("response.output_item.added")
        item["arguments"], item["status"] = call.arguments, "completed"
        return [
            added,
            self._event("response.function_call_arguments.delta", delta=call.arguments),
            self._event("response.function_call_arguments.done", arguments=call.arguments, name=call.name),
            self._whole("response.output_item.done"),
        ]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {
            "type": kind,
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
            **fields,
        }

    def _whole(self, kind: str) -> dict[str, Any]:
        """An event with the present item."""
        item = self.items[-1]
        content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
        return {"type": kind, "output_index": len(self.items) - 1, "item": {**item, **content}}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
