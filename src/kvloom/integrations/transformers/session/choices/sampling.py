"""Sampling by request in a session: temperature, top_p, top_k, min_p, seed, processors.

transformers' sessions have one generator and one configuration for all requests. Shapes: N tokens of a
request so far, V tokens of the vocabulary.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from kvloom.errors import StateError
from kvloom.integrations.transformers.session.choices.penalties import OfRequests
from kvloom.integrations.transformers.session.choices.prompt_scores import ProcessorsOfRequests, ScoringModel
from kvloom.integrations.transformers.session.requests.prompt import CHOICE, SALT, TURN, AgentTurn

_ROWS: Final = 64
"""Number of prompt tokens whose log probabilities are computed at once."""


@dataclass(frozen=True, slots=True)
class LogProb:
    """Log probabilities (natural) of the model, before processors and temperature.

    Attributes:
        chosen: Log probability of the chosen token.
        tokens: The likeliest tokens, the likeliest first.
        logprobs: Their log probabilities.
    """

    chosen: float
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class Choice:
    """Sampling parameters of one request, and its tokens and log probabilities.

    The same seed chooses the same tokens, whatever else is in the session and however often the request is
    preempted, if the logits have the same bits.

    Attributes:
        temperature: Temperature; below 1e-5 the likeliest token is taken.
        top_p: Sample from the fewest likeliest tokens with this total probability; 1 for all.
        top_k: Sample from this number of likeliest tokens; 0 for all.
        min_p: Sample from tokens with at least this share of the likeliest one's probability; 0 for all.
        processors: ``LogitsProcessor`` of transformers, called in order with ``input_ids`` ``[1, N]`` and
            ``scores`` ``[1, V]`` of this request alone before its token is chosen.
        seed: Seed of the random numbers, one for each token.
        num_logprobs: Number of likeliest tokens in each of ``logprobs``; ``None`` makes no ``logprobs``.
        scores_prompt: Whether the prompt has log probabilities, too, if the new tokens have any. The whole
            prompt is then computed, even if pages of it are known.
        may_draft: Whether a session with drafts may draft tokens for the request; its tokens are the same.
        tokens: The new tokens, in order.
        logprobs: One for each new token, in order.
        prompt_logprobs: One for each token of the prompt except the first, in order.
        num_found: Number of prompt tokens whose pages were found; ``None`` before the first new token.
        num_drafted: Number of drafted tokens that steps computed for the request.
        num_accepted: Number of these that were chosen.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    num_logprobs: int | None = None
    min_p: float = 0.0
    processors: Sequence[Any] = ()
    scores_prompt: bool = False
    may_draft: bool = True
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogProb] = field(default_factory=list)
    prompt_logprobs: list[LogProb] = field(default_factory=list)
    num_found: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    _prompt: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> "Choice":
        """The choice itself, since a preemption copies the arguments of a request."""
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken, without processors and log probabilities."""
        return self.temperature == 0 and self.num_logprobs is None and not self.processors

    @property
    def is_scoring(self) -> bool:
        """Whether log probabilities of the prompt are still to be computed."""
        return self.scores_prompt and self.num_logprobs is not None and not self.tokens

    def score(self, logits: Tensor, following: Sequence[int], position: int) -> None:
        """Keep the log probabilities of a piece of the prompt; a piece may come again after a preemption.

        Args:
            logits: Logits ``[N, V]`` of the model for N tokens of the prompt.
            following: The next token after each of the N tokens.
            position: Position of the first of the N tokens in the prompt.

        Raises:
            StateError: the tokens before them were not scored.
        """
        known = len(self.prompt_logprobs) - position
        if known < 0:
            raise StateError(
                f"a prompt must be scored from its first token on, got one after {position} of which "
                f"{len(self.prompt_logprobs)} are scored"
            )
        for row in range(known, len(following), _ROWS):
            end = min(row + _ROWS, len(following))
            self.prompt_logprobs += self._logprobs(logits[row:end], following[row:end])

    def choose(self, logits: Tensor, prompt: Sequence[int], position: int) -> int:
        """Choose the next token.

        Args:
            logits: Logits ``[V]`` of the model.
            prompt: Tokens before the first new token; read only when that is chosen.
            position: Position of the new token in the text.
        """
        changed = logits
        if self.processors:
            if self._prompt is None:
                self._prompt = torch.tensor(prompt, device=logits.device)
            new = torch.tensor(self.tokens, dtype=torch.int64, device=logits.device)
            input_ids = torch.cat([self._prompt, new])[None]
            for process in self.processors:
                changed = process(input_ids, changed.reshape(1, -1))[0]
        token = self.next_token(changed, position)
        self.tokens.append(token)
        self._note(logits, token)
        return token

    def next_token(self, logits: Tensor, position: int) -> int:
        """The token for processed ``logits`` ``[V]`` at a position of the text."""
        if self.temperature < 1e-5:
            return int(logits.argmax())
        values, tokens = logits, None
        if self.top_k or self.top_p < 1 or self.min_p:
            values, tokens = logits.topk(min(self.top_k or len(logits), len(logits)))
        probabilities = (values.double() / self.temperature).softmax(0)
        total = probabilities.cumsum(0)
        if self.top_p < 1:  # a token stays if those before it have less than top_p
            total = total[: max(1, int((total - probabilities < self.top_p).sum()))]
        if self.min_p:
            total = total[: int((probabilities >= self.min_p * probabilities[0]).sum())]
        draw = random.Random(f"{self.seed}:{position}").random() * total[-1]
        index = min(int(torch.searchsorted(total, draw, right=True)), len(total) - 1)
        return index if tokens is None else int(tokens[index])

    def _note(self, logits: Tensor, token: int) -> None:
        """Keep the log probabilities of a step, of ``logits`` ``[V]``."""
        if self.num_logprobs is not None:
            self.logprobs += self._logprobs(logits[None], [token])

    def _logprobs(self, logits: Tensor, chosen: Sequence[int]) -> Iterator[LogProb]:
        """Log probabilities of chosen tokens, one for each row of ``logits`` ``[N, V]``."""
        logprobs = logits.float().log_softmax(1)
        best, tokens = logprobs.topk(min(self.num_logprobs or 0, logits.shape[1]))
        own = logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0]
        rows = zip(own.tolist(), tokens.tolist(), best.tolist(), strict=True)
        return (LogProb(x, tuple(likeliest), tuple(theirs)) for x, likeliest, theirs in rows)


class Sampler(OfRequests):
    """Processor that gives each request's chosen token the largest logit, which the session then takes.

    Args:
        num_found: Function of a request's id: number of its prompt tokens whose pages were found.
    """

    supported_kwargs: dict[str, type] = {CHOICE: Choice, SALT: str, TURN: AgentTurn}  # noqa: RUF012

    def __init__(self, num_found: Callable[[str], int]) -> None:
        self._num_found = num_found

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Remember the requests of the next logits."""
        tensor = super().prepare_tensor_args(requests_with_new_token)
        for state in self._states:
            choice = state.logit_processor_kwargs.get(CHOICE)
            if choice is not None and choice.num_found is None:
                choice.num_found = self._num_found(state.request_id)
        return tensor

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Choose a token for each request; ``scores`` are ``[requests, V]``."""
        for row, state in enumerate(self._states):
            choice = state.logit_processor_kwargs.get(CHOICE)
            if choice is not None and not choice.is_plain:
                position = len(state.initial_tokens) + len(state.generated_tokens)
                token = choice.choose(scores[row], state.initial_tokens, position)
                scores[row, token] = torch.inf
        return scores


def choose_by_request(manager: Any) -> None:
    """Let the requests of a ``BatchingManager`` that has not started choose tokens by their ``Choice``."""
    manager.stepped = model = ScoringModel(manager.model)
    sampler = LogitsProcessorList([Sampler(manager.tokens_found)])
    manager.logit_processor = ProcessorsOfRequests(sampler, model)
    manager.logit_processor.tensors_required = 1
