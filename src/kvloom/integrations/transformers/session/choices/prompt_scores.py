"""Log probabilities of prompts: a step also computes logits of their tokens if a request asks for them.

Shapes: T tokens of all requests of a step, L of them whose logits transformers asks for, V tokens of the
vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)

from kvloom.integrations.transformers.session.more_logits import MoreLogits
from kvloom.integrations.transformers.session.requests.prompt import CHOICE


class _Rows(NamedTuple):
    """Prompt tokens of one request in a step.

    Attributes:
        choice: Choice of the request.
        start: Index of the first token among the tokens of the step.
        position: Position of the first token in the prompt.
        following: The next token after each of them.
    """

    choice: Any
    start: int
    position: int
    following: list[int]


class ScoringModel(MoreLogits):
    """The model in the steps of a session, which passes requests the logits of their prompts.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._rows: list[_Rows] = []

    def note(self, requests: Sequence[Any]) -> None:
        """Remember the prompts of the next step.

        Args:
            requests: Requests of transformers, in the order of their tokens.
        """
        self._rows, start = [], 0
        for request in requests:
            state, count = request.state, request.query_length
            choice = state.logit_processor_kwargs.get(CHOICE)
            if choice is not None and choice.is_scoring:
                position = state.position_offset - count  # it has been advanced
                following = state.initial_tokens[position + 1 : position + 1 + count]
                self._rows.append(_Rows(choice, start, position, following))
            start += count

    def __call__(self, **inputs: Any) -> Any:
        """The model's output, with logits ``[1, L, V]``, or ``[1, T, V]`` if the model always returns all."""
        rows, self._rows = self._rows, []
        if not rows:
            return self._model(**inputs)
        counts = [len(x.following) for x in rows]
        own = [x.start + i for x, count in zip(rows, counts, strict=True) for i in range(count)]
        output, logits = self.forward_with(own, inputs)
        for x, scored in zip(rows, logits.split(counts), strict=True):
            x.choice.score(scored, x.following, x.position)
        return output


class ProcessorsOfRequests(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Logits processors of a session that pass the requests of each step to a ``ScoringModel``.

    Args:
        processors: As in transformers.
        model: The model of the steps.
    """

    def __init__(self, processors: Any, model: ScoringModel) -> None:
        super().__init__(processors)
        self._model = model

    def prepare_tensor_args(self, requests_in_batch: Any, arg_storage: Any) -> Any:
        """Prepare as transformers does, and note the requests of the step."""
        self._model.note(requests_in_batch)
        return super().prepare_tensor_args(requests_in_batch, arg_storage)
