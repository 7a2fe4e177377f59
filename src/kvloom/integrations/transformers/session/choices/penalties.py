"""Logits processors for penalties and biases that transformers does not have.

Shapes: N tokens of the request so far, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

_OF_TEXT: Final = ("sequence_bias", "repetition_penalty", "no_repeat_ngram_size")
"""Fields of a generation configuration that make processors which read the text of a request."""


class CountPenalties(LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties of tokens that were generated, as OpenAI's API defines them.

    ``logit - count * frequency - (count > 0) * presence``, where ``count`` is the number of times that the
    token was generated; the prompt is not counted.

    Args:
        num_prompt: Number of tokens of the prompt.
        presence: Penalty of a token that was generated.
        frequency: Penalty for each time that a token was generated.
    """

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The changed ``scores`` ``[1, V]`` after ``input_ids`` ``[1, N]``."""
        new = input_ids[0, self._num_prompt :]
        counts = torch.bincount(new, minlength=scores.shape[-1]).to(scores.dtype)
        return scores - counts * self._frequency - (counts > 0) * self._presence


class TokenBias(LogitsProcessor):  # type: ignore[misc]
    """Biases that are added to the logits of some tokens; ids without a logit are ignored.

    Args:
        bias: Bias of each token id.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._tokens, self._bias = torch.tensor([*bias]), torch.tensor([*bias.values()])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The changed ``scores`` ``[1, V]``."""
        known = self._tokens < scores.shape[-1]
        tokens, bias = (x[known].to(scores.device) for x in (self._tokens, self._bias))
        return scores.index_add(1, tokens, bias.to(scores.dtype)[None])


class OfRequests(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Base of processors of a session that know the requests of each step, and need no tensor."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012  # the base has it so
    ignored_kwargs: tuple[str, ...] = ()
    _states: Sequence[Any] = ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Do nothing."""

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Remember the requests of the next logits."""
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32)


class OfText(OfRequests):
    """A processor that reads the text, called for each request of a step with the text of that request.

    transformers' sessions leave such processors out.

    Args:
        process: A ``LogitsProcessor``.
    """

    def __init__(self, process: Any) -> None:
        self._process = process

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """The changed ``scores`` ``[requests, V]``."""
        rows = [
            self._process(
                torch.tensor([[*x.initial_tokens, *x.generated_tokens]], device=scores.device), row[None]
            )
            for x, row in zip(self._states, scores, strict=False)
        ]
        return torch.cat([*rows, scores[len(rows) :]])


@contextmanager
def text_apart(manager: Any, generation: Any) -> Iterator[None]:
    """Context in which a manager is made, which has processors that read the text afterwards.

    Meanwhile its generation configuration asks for none, since transformers would leave them out.

    Args:
        manager: A ``ContinuousBatchingManager``.
        generation: Its generation configuration.
    """
    said = {name: getattr(generation, name, None) for name in _OF_TEXT}
    made: list[Any] = []  # in the order of ``generate``, where they come before temperature
    if said["sequence_bias"] is not None:
        made.append(SequenceBiasLogitsProcessor(said["sequence_bias"]))
    if said["repetition_penalty"] not in (None, 1):
        made.append(RepetitionPenaltyLogitsProcessor(said["repetition_penalty"]))
    if said["no_repeat_ngram_size"]:
        made.append(NoRepeatNGramLogitsProcessor(said["no_repeat_ngram_size"]))
    try:
        for name in said:
            setattr(generation, name, None)
        yield
    finally:
        for name, value in said.items():
            setattr(generation, name, value)
    if made:
        processors = manager.logit_processor
        processors.logits_processor[:0] = [OfText(process) for process in made]
        processors.tensors_required += len(made)
        processors.do_processing = True
