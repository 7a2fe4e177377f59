"""The parameters of one request, read from its JSON and checked before anything is computed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvloom.errors import ArgumentError

_MOST_ANSWERS: Final = 16
_MOST_STOPS: Final = 4
_MOST_LOGPROBS: Final = {"chat": 20, "text": 5}

# Fields that ask for nothing where they have these values.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
}
_COMMON: Final = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "cache_salt",
    "user",
    "metadata",
)
_FIELDS: Final[Mapping[str, Collection[str]]] = {
    "chat": {*_COMMON, "messages", "max_completion_tokens", "top_logprobs", "tools", "chat_template_kwargs"},
    "text": {*_COMMON, "prompt"},
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters of one request, beside its text.

    Attributes:
        max_tokens: New tokens; ``None`` if not said.
        temperature: 0 takes the likeliest token.
        top_p: As of ``Choice``.
        top_k: As of ``Choice``.
        seed: ``None`` if not said.
        stop: Texts before which an answer ends.
        count: Answers.
        stream: Whether they come in pieces.
        usage: Whether a stream ends with the number of its tokens.
        logprobs: Likeliest tokens of each step; ``None`` for no log probabilities.
        salt: Only requests of one salt share pages.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    count: int
    stream: bool
    usage: bool
    logprobs: int | None
    salt: str

    @classmethod
    def of(cls, body: Any, kind: str, defaults: Any) -> "Wanted":
        """Read a request.

        Args:
            body: JSON.
            kind: ``"chat"`` or ``"text"``.
            defaults: The model's ``GenerationConfig``.

        Raises:
            ArgumentError: a field is unknown, not supported, or has no such value.
        """
        if not isinstance(body, dict):
            raise ArgumentError(f"the request must be a JSON object, got {type(body).__name__}")
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    raise ArgumentError(
                        f"{name} must be left out, as it is not supported, got {shown(value)}"
                    )
            elif name not in _FIELDS[kind]:
                raise ArgumentError(f"{shown(name)} is no field that is supported")
        sampled = bool(getattr(defaults, "do_sample", False)) or any(
            name in given for name in ("temperature", "top_p", "top_k")
        )
        usual = defaults if getattr(defaults, "do_sample", False) else None
        return cls(
            max_tokens=_max_tokens(given),
            temperature=_number(given, "temperature", 0, 2, _usual(usual, "temperature", 1.0))
            if sampled
            else 0.0,
            top_p=_number(given, "top_p", 0, 1, _usual(usual, "top_p", 1.0)),
            top_k=_whole(given, "top_k", 0, default=int(_usual(usual, "top_k", 0))) or 0,
            seed=_whole(given, "seed", -(2**63), 2**64),
            stop=_stops(given.get("stop", [])),
            count=_whole(given, "n", 1, _MOST_ANSWERS) or 1,
            stream=_flag(given, "stream"),
            usage=_usage(given),
            logprobs=_logprobs(given, kind),
            salt=_text(given, "cache_salt"),
        )


def shown(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _usual(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else float(value)


def _number(body: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ArgumentError(f"{name} must be a number from {low} to {high}, got {shown(value)}")
    return float(value)


def _whole(
    body: Mapping[str, Any], name: str, low: int, high: float = math.inf, default: int | None = None
) -> int | None:
    value = body.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        most = "" if high == math.inf else f" and at most {high}"
        raise ArgumentError(f"{name} must be an integer of at least {low}{most}, got {shown(value)}")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be true or false, got {shown(value)}")
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a string, got {shown(value)}")
    return value


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    """By either name; a request may have both if they say the same."""
    newer, older = (_whole(body, name, 1) for name in ("max_completion_tokens", "max_tokens"))
    if None not in (newer, older) and newer != older:
        raise ArgumentError(
            f"max_tokens must be left out beside max_completion_tokens of {newer}, got {shown(older)}"
        )
    return newer or older


def _usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ArgumentError(f"stream_options must be an object with include_usage, got {shown(options)}")
    if "stream_options" in body and not _flag(body, "stream"):
        raise ArgumentError(f"stream_options must be left out where stream is not true, got {shown(options)}")
    if _flag(options, "include_obfuscation"):
        raise ArgumentError(
            "stream_options.include_obfuscation must be left out, as it is not supported, got True"
        )
    return _flag(options, "include_usage")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(x, str) and 0 < len(x) <= 1000 for x in stops):
        raise ArgumentError(f"stop must be texts of 1 to 1000 characters, got {shown(value)}")
    if len(stops) > _MOST_STOPS:
        raise ArgumentError(f"stop must be at most {_MOST_STOPS} texts, got {len(stops)}")
    return tuple(stops)


def _logprobs(body: Mapping[str, Any], kind: str) -> int | None:
    if kind == "text":
        return _whole(body, "logprobs", 0, _MOST_LOGPROBS[kind])
    most = _whole(body, "top_logprobs", 0, _MOST_LOGPROBS[kind])
    if not _flag(body, "logprobs"):
        if most:
            raise ArgumentError("logprobs must be true where there are top_logprobs")
        return None
    return most or 0
