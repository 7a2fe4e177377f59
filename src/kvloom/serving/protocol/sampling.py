"""Sampling parameters of an answer, read from a request's JSON."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.session.choices.penalties import CountPenalties, TokenBias
from kvloom.integrations.transformers.session.choices.sampling import Choice
from kvloom.serving.protocol.fields import flag, number, shown, whole

SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "drafts",
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of an answer, and the tokens that end it.

    Attributes:
        temperature: Temperature; 0 takes the likeliest token.
        top_p, top_k, min_p: As in ``Choice``.
        seed: Seed; ``None`` if not given.
        presence_penalty, frequency_penalty: As in ``CountPenalties``.
        repetition_penalty: Divisor of positive logits, and factor of negative logits, for tokens of the
            prompt and the answer.
        logit_bias: Numbers that are added to the logits of tokens.
        min_tokens: Least number of new tokens; before that nothing ends an answer.
        ignore_eos: Whether the model's end tokens do not end an answer.
        stop_token_ids: Further tokens that end an answer.
        may_draft: Whether steps may draft tokens of the answer, which changes its time alone.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    may_draft: bool

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Any) -> "Sampling":
        """Read a request.

        Args:
            given: Its fields that are not null.
            defaults: The model's ``GenerationConfig``.

        Raises:
            ArgumentError: a field has an invalid value.
        """
        usual = defaults if getattr(defaults, "do_sample", False) else None
        sampled = usual is not None or any(x in given for x in ("temperature", "top_p", "top_k", "min_p"))
        return cls(
            temperature=number(given, "temperature", 0, 2, _usual(usual, "temperature", 1.0))
            if sampled
            else 0.0,
            top_p=number(given, "top_p", 0, 1, _usual(usual, "top_p", 1.0)),
            top_k=whole(given, "top_k", 0, default=int(_usual(usual, "top_k", 0))) or 0,
            min_p=number(given, "min_p", 0, 1, _usual(usual, "min_p", 0.0)),
            seed=whole(given, "seed", -(2**63), 2**64),
            presence_penalty=number(given, "presence_penalty", -2, 2, 0.0),
            frequency_penalty=number(given, "frequency_penalty", -2, 2, 0.0),
            repetition_penalty=number(
                given, "repetition_penalty", 0.01, 100, _usual(defaults, "repetition_penalty", 1.0)
            ),
            logit_bias=_bias(given.get("logit_bias", {})),
            min_tokens=whole(given, "min_tokens", 0) or 0,
            ignore_eos=flag(given, "ignore_eos"),
            stop_token_ids=_token_ids(given.get("stop_token_ids", [])),
            may_draft=flag(given, "drafts", default=True),
        )

    def named_tokens(self) -> dict[str, list[int]]:
        """Token ids of the request, by the field that has them."""
        named = {"logit_bias": [*self.logit_bias], "stop_token_ids": [*self.stop_token_ids]}
        return {name: tokens for name, tokens in named.items() if tokens}

    def ends(self, end_tokens: Collection[int]) -> frozenset[int]:
        """Tokens that end an answer; ``end_tokens`` are the model's."""
        return frozenset([*self.stop_token_ids, *(() if self.ignore_eos else end_tokens)])

    def choices(
        self,
        count: int,
        num_prompt: int,
        end_tokens: Collection[int],
        num_logprobs: int | None,
        device: Any,
        scores_prompt: bool = False,
    ) -> list[Choice]:
        """Choices of ``count`` answers to one prompt.

        Args:
            count: Number of answers.
            num_prompt: Number of tokens of the prompt.
            end_tokens: End tokens of the model.
            num_logprobs: As in ``Choice``.
            device: Device of the logits.
            scores_prompt: As in ``Choice``.
        """
        seed = random.getrandbits(63) if self.seed is None else self.seed
        processors = self._processors(num_prompt, self.ends(end_tokens), device)
        return [
            Choice(
                self.temperature,
                self.top_p,
                self.top_k,
                seed + index,
                num_logprobs,
                min_p=self.min_p,
                processors=processors,
                scores_prompt=scores_prompt,
                may_draft=self.may_draft,
            )
            for index in range(count)
        ]

    def _processors(self, num_prompt: int, ends: Collection[int], device: Any) -> list[LogitsProcessor]:
        made: list[LogitsProcessor] = []
        if self.logit_bias:
            made.append(TokenBias(self.logit_bias))
        if self.repetition_penalty != 1:
            made.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            made.append(CountPenalties(num_prompt, self.presence_penalty, self.frequency_penalty))
        if self.min_tokens and ends:
            made.append(
                MinNewTokensLengthLogitsProcessor(num_prompt, self.min_tokens, sorted(ends), device=device)
            )
        return made


def _usual(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else float(value)


def _bias(value: Any) -> dict[int, float]:
    words = "logit_bias must be an object of numbers from -100 to 100 by token ids"
    if not isinstance(value, dict):
        raise ArgumentError(f"{words}, got {shown(value)}")
    bias = {}
    for token, added in value.items():
        is_id = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 20
        is_number = isinstance(added, int | float) and not isinstance(added, bool) and -100 <= added <= 100
        if not is_id or not is_number:
            raise ArgumentError(f"{words}, got {shown({token: added})}")
        bias[int(token)] = float(added)
    return bias


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ArgumentError(f"stop_token_ids must be a list of token ids, got {shown(value)}")
    return tuple(value)
