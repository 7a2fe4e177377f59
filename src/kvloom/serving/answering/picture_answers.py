"""Answers to chats with pictures by ``generate`` with a pool, and a check that a model supports it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import StoppingCriteriaList

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVPool
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.session.choices.sampling import Choice
from kvloom.integrations.transformers.session.self_check import distance_of
from kvloom.serving.answering.vision import PicturePrompt

PAGE_SIZE: Final = 1
"""One token in a page, so that a picture, which is found as a whole, need not end at a page's end."""

_CONTENT: Final = "pictures"
"""Content of all caches, since ``PicturePrompt.known_as`` identifies the pictures."""


@dataclass(frozen=True, slots=True)
class PictureOutput:
    """State of an answer, with the names of transformers' sessions."""

    request_id: str
    generated_tokens: list[int]
    error: str | None = None
    is_last: bool = False

    def is_finished(self) -> bool:
        """Whether no more tokens follow."""
        return self.is_last


@dataclass(slots=True)
class Job:
    """An answer to be computed.

    Attributes:
        request_id: Its id.
        prompt: The prompt.
        salt: Only answers with the same salt share pages.
        max_tokens: Largest number of new tokens.
        ends: Tokens that end it.
        choice: Sampling parameters.
        tokens: Tokens so far.
        is_cancelled: Whether it was cancelled.
    """

    request_id: str
    prompt: PicturePrompt
    salt: str
    max_tokens: int
    ends: frozenset[int]
    choice: Choice
    tokens: list[int] = field(default_factory=list)
    is_cancelled: bool = False


def answer_by_generate(model: Any, pool: KVPool, job: Job, deliver: Callable[[PictureOutput], None]) -> None:
    """Compute an answer, and let later ones find its pages.

    Args:
        model: A copy that ``twin_of`` made.
        pool: Pool of the model.
        job: The answer, to which tokens are added.
        deliver: Called after each token.
    """
    cache = _begun(pool, job.prompt, job.salt)
    job.choice.num_found = int(cache.get_seq_length())
    _generated(
        model,
        job.prompt,
        cache,
        max_new_tokens=job.max_tokens,
        logits_processor=LogitsProcessorList([_Choosing(job)]),
        stopping_criteria=StoppingCriteriaList([_Steps(job, deliver)]),
    )
    pool.commit(cache, torch.tensor([[*job.prompt.known_as, *job.tokens]]))


def twin_of(model: Any) -> Any:
    """A copy of a model with the same parameters, and with attention and a configuration of its own."""
    twin = copy.deepcopy(model, {id(x): x for x in model.parameters()})
    twin.generation_config = GenerationConfig()  # each request has its own parameters
    return twin


def _begun(pool: KVPool, prompt: PicturePrompt, salt: str) -> Any:
    """A cache that holds all pictures of a prompt, or only tokens before the first picture."""
    ids = torch.tensor([prompt.known_as])
    cache = pool.begin(ids, salt, _CONTENT)
    if prompt.first < cache.get_seq_length() <= prompt.last:
        cache = pool.begin(ids[:, : prompt.first + 1], salt, _CONTENT)
    return cache


def _generated(model: Any, prompt: PicturePrompt, cache: Any, **options: Any) -> Any:
    """Result of ``generate`` with a cache that ``_begun`` made, or with an empty one."""
    ids = torch.tensor([prompt.tokens], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_ARGUMENT: cache}
    for name, value in prompt.inputs_behind(int(cache.get_seq_length())).items():
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        placed = (
            value.to(model.device, model.dtype if is_float else None) if isinstance(value, Tensor) else value
        )
        inputs[name] = placed
    return model.generate(**inputs, do_sample=False, **options)


class _Choosing(LogitsProcessor):  # type: ignore[misc]
    """Processor that gives the chosen token the largest logit, as in a session."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The changed ``scores`` ``[1, V]`` after ``input_ids`` ``[1, T]``."""
        choice = self._job.choice
        if not choice.is_plain:
            token = choice.choose(scores[0], self._job.prompt.tokens, input_ids.shape[1])
            scores = scores.clone()
            scores[0, token] = torch.inf
        return scores


class _Steps(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that delivers each new token, and stops after the last one."""

    def __init__(self, job: Job, deliver: Callable[[PictureOutput], None]) -> None:
        self._job, self._deliver = job, deliver

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """``[1]`` bool, whether to stop after ``input_ids`` ``[1, T]``."""
        job = self._job
        job.tokens.append(int(input_ids[0, -1]))
        is_last = job.tokens[-1] in job.ends or len(job.tokens) == job.max_tokens
        self._deliver(PictureOutput(job.request_id, [*job.tokens], is_last=is_last))
        return torch.full((1,), is_last or job.is_cancelled, device=input_ids.device)


def expect_same_logits(model: Any, prompts: Sequence[PicturePrompt], empty_cache: Any) -> None:
    """Raise unless a model has the same logits after found prefixes as without.

    Distances are those of ``batching.self_check``; allowed is the root of the dtype's epsilon.

    Args:
        model: A copy that ``twin_of`` made.
        prompts: Two prompts with one picture each, and the same texts around them.
        empty_cache: An empty cache of transformers for the model.

    Raises:
        UnsupportedError: logits differ, or no prefix is found.
    """
    num_tokens = sum(len(prompt.tokens) + 1 for prompt in (*prompts, *prompts))
    with KVPool.for_model(model, page_size=PAGE_SIZE, max_tokens=num_tokens) as pool:

        def logits(prompt: PicturePrompt, salt: str) -> tuple[Tensor, int]:
            cache = _begun(pool, prompt, salt)
            num_found = int(cache.get_seq_length())
            computed = _logits(model, prompt, cache)
            pool.commit(cache, torch.tensor([prompt.known_as]))
            return computed, num_found

        one, other = prompts
        stock = _logits(model, one, empty_cache)
        cold, _ = logits(one, "")
        again, num_found = logits(one, "")
        alone, _ = logits(other, "alone")
        behind, num_text = logits(other, "")
    if not (num_found > one.last and 0 < num_text <= other.first):
        raise UnsupportedError(
            f"the pool must find {one.last + 1} tokens or more of a prompt again, its picture included, and "
            f"1 to {other.first} of one with another picture, got {num_found} and {num_text}"
        )
    allowed = torch.finfo(model.dtype).eps ** 0.5
    for name, found, expected in (
        ("with a pool", cold, stock),
        ("after a picture that was found", again, cold),
        ("after a text that was found", behind, alone),
    ):
        measured = distance_of([found[None]], [expected[None]])
        if not measured <= allowed:  # also true if it is NaN
            raise UnsupportedError(
                f"logits {name} must be those computed without it, got a difference of {measured:.1e} of "
                f"their norm, where {allowed:.1e} is allowed"
            )


def _logits(model: Any, prompt: PicturePrompt, cache: Any) -> Tensor:
    """Logits ``[V]`` after a prompt."""
    made = _generated(
        model, prompt, cache, max_new_tokens=1, output_logits=True, return_dict_in_generate=True
    )
    logits: Tensor = made.logits[0][0]
    return logits
