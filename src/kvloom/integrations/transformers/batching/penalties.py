"""Logits processors for penalties and biases that transformers does not have.

Shapes: N tokens of the request so far, V tokens of the vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


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
