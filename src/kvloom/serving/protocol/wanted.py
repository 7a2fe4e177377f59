"""Parameters of one request, read from its JSON and checked before anything is computed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.serving.protocol.fields import flag, read_fields, shown, text, whole
from kvloom.serving.protocol.sampling import SAMPLING_FIELDS, Sampling
from kvloom.serving.protocol.structured import Structure
from kvloom.serving.protocol.tools import ForcedCalls

_MOST_ANSWERS: Final = 16
_MOST_STOPS: Final = 4
_MOST_LOGPROBS: Final = {"chat": 20, "text": 5}

# Fields with the values that change nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
_STREAM_OPTIONS: Final = ("include_usage", "continuous_usage_stats", "include_obfuscation")
_COMMON: Final = (
    "model",
    "max_tokens",
    *SAMPLING_FIELDS,
    "stop",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "response_format",
    "structured_outputs",
    "cache_salt",
    "user",
    "metadata",
)
_FIELDS: Final[Mapping[str, Collection[str]]] = {
    "chat": {
        *_COMMON,
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
    },
    "text": {*_COMMON, "prompt", "echo"},
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parameters of one request, beside its text.

    Attributes:
        max_tokens: Largest number of new tokens; ``None`` if not given.
        sampling: Sampling parameters.
        stop: Texts before which an answer ends.
        count: Number of answers to each prompt.
        stream: Whether answers come in pieces.
        usage: Whether a stream ends with the number of its tokens.
        running_usage: Whether each chunk of a stream has the number of tokens so far.
        logprobs: Number of likeliest tokens of each step; ``None`` for no log probabilities.
        salt: Only requests with the same salt share pages.
        echo: Whether an answer begins with its prompt, and its log probabilities with those of the prompt.
        is_prompt_alone: Whether only the echo is requested; the one new token that is computed is left out.
        structure: Structure of an answer; ``None`` for any text.
        calls: Tool calls that the answer must be; ``None`` if it may be a text.
    """

    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    count: int
    stream: bool
    usage: bool
    running_usage: bool
    logprobs: int | None
    salt: str
    echo: bool
    is_prompt_alone: bool
    structure: Structure | None
    calls: ForcedCalls | None

    @classmethod
    def of(cls, body: Any, kind: str, defaults: Any) -> "Wanted":
        """Read a request.

        Args:
            body: JSON of the request.
            kind: ``"chat"`` or ``"text"``.
            defaults: The model's ``GenerationConfig``.

        Raises:
            ArgumentError: a field is unknown, not supported, or has an invalid value.
        """
        given = read_fields(body, _FIELDS[kind], _NEUTRAL)
        calls, max_tokens, stream_options = ForcedCalls.of(given), _max_tokens(given), _stream_options(given)
        return cls(
            max_tokens=1 if max_tokens == 0 else max_tokens,
            sampling=Sampling.of(given, defaults),
            stop=_stops(given.get("stop", [])),
            count=whole(given, "n", 1, _MOST_ANSWERS) or 1,
            stream=flag(given, "stream"),
            usage=stream_options["include_usage"],
            running_usage=stream_options["continuous_usage_stats"],
            logprobs=_logprobs(given, kind),
            salt=text(given, "cache_salt"),
            echo=flag(given, "echo"),
            is_prompt_alone=max_tokens == 0,
            structure=Structure.of(given) if calls is None else calls.structure,
            calls=calls,
        )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    """Largest number of new tokens, by either name, or by both if they are equal; 0 for an echo alone."""
    least = 0 if flag(body, "echo") else 1
    newer, older = (whole(body, name, least) for name in ("max_completion_tokens", "max_tokens"))
    if None not in (newer, older) and newer != older:
        raise ArgumentError(
            f"max_tokens must be left out beside max_completion_tokens of {newer}, got {shown(older)}"
        )
    return older if newer is None else newer


def _stream_options(body: Mapping[str, Any]) -> dict[str, bool]:
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - set(_STREAM_OPTIONS):
        raise ArgumentError(
            f"stream_options must be an object of {', '.join(_STREAM_OPTIONS)}, got {shown(options)}"
        )
    if "stream_options" in body and not flag(body, "stream"):
        raise ArgumentError(f"stream_options must be left out where stream is not true, got {shown(options)}")
    given = {name: flag(options, name) for name in _STREAM_OPTIONS}
    if given["include_obfuscation"]:
        raise ArgumentError(
            "stream_options.include_obfuscation must be left out, as it is not supported, got True"
        )
    if given["continuous_usage_stats"] and not given["include_usage"]:
        raise ArgumentError(
            "stream_options.continuous_usage_stats must be left out where include_usage is not true, got True"
        )
    return given


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(x, str) and 0 < len(x) <= 1000 for x in stops):
        raise ArgumentError(f"stop must be texts of 1 to 1000 characters, got {shown(value)}")
    if len(stops) > _MOST_STOPS:
        raise ArgumentError(f"stop must be at most {_MOST_STOPS} texts, got {len(stops)}")
    return tuple(stops)


def _logprobs(body: Mapping[str, Any], kind: str) -> int | None:
    if kind == "text":
        return whole(body, "logprobs", 0, _MOST_LOGPROBS[kind])
    most = whole(body, "top_logprobs", 0, _MOST_LOGPROBS[kind])
    if not flag(body, "logprobs"):
        if most:
            raise ArgumentError("logprobs must be true where there are top_logprobs")
        return None
    return most or 0
