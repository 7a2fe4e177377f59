"""Changes of a request's logits that transformers has no processor for, as processors of transformers.

Shapes: N tokens of the request so far, V tokens that the model knows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


class CountPenalties(LogitsProcessor):  # type: ignore[misc]
    """Lowers the logits of tokens that the answer has already, as OpenAI's API defines it.

    ``logit - count * frequency - (count > 0) * presence``, where ``count`` is how often the token was
    generated; the prompt does not count.

    Args:
        num_prompt: Tokens of the prompt.
        presence: Once for each token that was generated.
        frequency: As often as it was generated.
    """

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The changed ``scores`` ``[1, V]`` after ``input_ids`` ``[1, N]``."""
        new = input_ids[0, self._num_prompt :]
        counts = torch.bincount(new, minlength=scores.shape[-1]).to(scores.dtype)
        return scores - counts * self._frequency - (counts > 0) * self._presence


class TokenBias(LogitsProcessor):  # type: ignore[misc]
    """Adds a number to the logits of some tokens; a token that no logit is of is left out.

    Args:
        bias: Of each token id.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._tokens, self._bias = torch.tensor([*bias]), torch.tensor([*bias.values()])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The changed ``scores`` ``[1, V]``."""
        known = self._tokens < scores.shape[-1]
        tokens, bias = (x[known].to(scores.device) for x in (self._tokens, self._bias))
        return scores.index_add(1, tokens, bias.to(scores.dtype)[None])
