"""Structured answers: JSON, with or without a schema, or a text of another grammar.

Grammars are those of llguidance, which allows the tokens with which an answer can still match its grammar.
Shapes: N tokens of a request so far, V tokens of the vocabulary.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvloom.errors import ArgumentError
from kvloom.serving import expect_installed
from kvloom.serving.protocol.fields import shown

PACKAGE: Final = "llguidance"

JSON_OPTIONS: Final = {
    "lenient": False,  # unsupported keywords are errors
    "whitespace_flexible": True,
    "whitespace_pattern": r" ?|\n[ \t]{0,20}",  # bounded, since a small model would write spaces forever
}
"""Options of llguidance for schemas."""

_BITS: Final = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of an answer.

    Attributes:
        field: Field of the request that has it.
        grammar: Grammar for llguidance.
    """

    field: str
    grammar: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Structure | None":
        """Read ``response_format`` or vLLM's ``structured_outputs``; ``None`` if any text is allowed.

        Args:
            given: Fields of a request that are not null.

        Raises:
            ArgumentError: a field has an invalid value.
            UnsupportedError: llguidance is not installed.
        """
        asked = [x for x in (_format(given), _outputs(given)) if x is not None]
        if not asked:
            return None
        if len(asked) == 2:
            raise ArgumentError("response_format must be left out beside structured_outputs")
        for field in ("min_tokens", "ignore_eos"):  # a structured answer must be able to end
            if given.get(field):
                raise ArgumentError(f"{field} must be left out beside {asked[0].field}")
        return asked[0]


class Grammars:
    """Factory of grammar matchers for one tokenizer; threads may share it.

    Args:
        tokenizer: A fast tokenizer.
        end_tokens: End tokens of the model.
        num_logits: V.
    """

    def __init__(self, tokenizer: Any, end_tokens: Collection[int], num_logits: int) -> None:
        self._tokenizer, self._ends = tokenizer, sorted(end_tokens)
        self._num_tokens = max(num_logits, len(tokenizer))
        self._made: Any = None
        self._lock = Lock()

    def matcher(self, structure: Structure) -> Any:
        """A new matcher, of which each answer gets a copy.

        Raises:
            ArgumentError: the grammar is invalid or not supported, or the model has no end token.
        """
        if not self._ends:
            raise ArgumentError(
                f"{structure.field} must be left out, as the model's generation config has no end token"
            )
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._of_tokenizer(), structure.grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ArgumentError(
                f"{structure.field} must be one that is supported, got one that is not: {_reason(matcher)}"
            )
        return matcher

    def _of_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                self._made = from_tokenizer(self._tokenizer, n_vocab=self._num_tokens, eos_token=self._ends)
            return self._made


class Grammar(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that allows the tokens that the grammar of one answer allows next.

    Args:
        structure: Structure of the answer.
        matcher: Matcher of this answer.
        num_prompt: Number of tokens of the prompt.
        ends: Tokens that end an answer.

    Attributes:
        failure: Why the matcher failed, after which only end tokens are allowed; ``None`` if it has not.
    """

    def __init__(self, structure: Structure, matcher: Any, num_prompt: int, ends: Collection[int]) -> None:
        self._field, self._matcher, self._ends = structure.field, matcher, [*ends]
        self._num_prompt = self._num_read = num_prompt
        self.failure: str | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` ``[1, V]`` after ``input_ids`` ``[1, N]``, with ``-inf`` for forbidden tokens."""
        self._read(input_ids[0, self._num_read :].tolist())
        mask = self._matcher.compute_bitmask()
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        if self._matcher.is_error():
            self.failure = f"{self._field} has become too much to follow: {_reason(self._matcher)}"
            allowed[[token for token in self._ends if token < len(allowed)]] = True
        else:
            bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)[:, None].bitwise_right_shift(_BITS)
            known = (bits & 1).bool().flatten()[: len(allowed)]
            allowed[: len(known)] = known
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The usual tokens of the text that is forced after ``tokens``, all new ones of the answer."""
        self._read(tokens[self._num_read - self._num_prompt :])
        return [*self._matcher.compute_ff_tokens()]

    def _read(self, new: Sequence[int]) -> None:
        self._num_read += len(new)
        self._matcher.consume_tokens([*new])


def ll_matcher() -> Any:
    """llguidance's ``LLMatcher``, which makes grammars; raises UnsupportedError if it is not installed."""
    expect_installed((PACKAGE,))
    from llguidance import LLMatcher

    return LLMatcher


def json_grammar(field: str, schema: Mapping[str, Any]) -> Structure:
    """Structure of JSON with a schema; raises UnsupportedError if llguidance is not installed."""
    matcher = ll_matcher()
    try:
        grammar = matcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{field} must be a JSON schema, got one that is not: {error}") from error
    return Structure(field, grammar)


def _format(given: Mapping[str, Any]) -> Structure | None:
    value = given.get("response_format", {"type": "text"})
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and value.keys() == {"type"}:
        return None
    if kind == "json_object" and value.keys() == {"type"}:
        return json_grammar("response_format", {"type": "object"})
    if kind == "json_schema" and value.keys() == {"type", "json_schema"}:
        inner, field = value["json_schema"], "response_format.json_schema"
        if not isinstance(inner, dict) or inner.keys() - {"name", "description", "schema", "strict"}:
            raise ArgumentError(f"{field} must be an object with a name and a schema, got {shown(inner)}")
        if not isinstance(inner.get("schema"), dict):
            raise ArgumentError(f"{field}.schema must be an object, got {shown(inner.get('schema'))}")
        return json_grammar(f"{field}.schema", inner["schema"])
    raise ArgumentError(
        "response_format must have type 'text', 'json_object', or 'json_schema' with a json_schema, got "
        f"{shown(value)}"
    )


def _outputs(given: Mapping[str, Any]) -> Structure | None:
    value = given.get("structured_outputs")
    if value is None:
        return None
    asked = {name: x for name, x in value.items() if x is not None} if isinstance(value, dict) else {}
    if len(asked) == 1:
        [(name, inner)] = asked.items()
        field = f"structured_outputs.{name}"
        if name == "json" and isinstance(inner, dict):
            return json_grammar(field, inner)
        if name == "json_object" and inner is True:
            return json_grammar(field, {"type": "object"})
        if name == "regex" and isinstance(inner, str):
            return Structure(field, ll_matcher().grammar_from_regex(inner))
        if name == "choice" and isinstance(inner, list) and inner and all(map(_is_text, inner)):
            lark = "start: " + " | ".join(json.dumps(text) for text in inner)
            return Structure(field, ll_matcher().grammar_from_lark(lark))
    raise ArgumentError(
        "structured_outputs must have one of json (a schema), json_object (true), regex (a text) and choice "
        f"(a list of texts), got {shown(value)}"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _reason(matcher: Any) -> str:
    # The message without the grammar, which llguidance appends.
    error, *_ = re.split(r"\n *\d+ \| ", str(matcher.get_error()))
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]
