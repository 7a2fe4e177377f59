"""Check that a server answers a request among others, and with drafts, as alone and without, bit for bit."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from kvloom.errors import UnsupportedError


@dataclass(slots=True)
class Answer:
    """A server's answer to a request.

    Attributes:
        prompt: Prompt of the request.
        new_tokens: Number of new tokens that were requested.
        tokens: Tokens of the answer, as texts.
        logprobs: Natural logarithms of their probabilities.
        num_found: Number of prompt tokens that the server found in its pages.
        num_accepted: Number of tokens that the server had drafted.
        text: Text of the answer.
    """

    prompt: str
    new_tokens: int
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_found: int = 0
    num_accepted: int = 0
    text: str = ""

    def add(self, chunk: Any) -> None:
        """Add the text, the tokens and the usage of a chunk of the answer."""
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self.num_found = (details and details.cached_tokens) or 0
            drafts = chunk.usage.completion_tokens_details
            self.num_accepted = (drafts and drafts.accepted_prediction_tokens) or 0
        for choice in chunk.choices:
            self.text += choice.text
            if choice.logprobs is not None:
                self.tokens += choice.logprobs.tokens or []
                self.logprobs += choice.logprobs.token_logprobs or []


@dataclass(slots=True)
class AnswerCheck:
    """Counts of compared answers, and of those that differ.

    Attributes:
        refused: Number of requests that the server had no place for among others.
        checked: Number of compared answers.
        other_tokens: Number of answers with other tokens.
        other_logprobs: Number of answers with other log probabilities, including those with other tokens.
        behind_found: Number of answers whose prompts began with a found prefix.
        other_behind_found: Number of these with other log probabilities.
        accepted: Number of tokens of these answers that had been drafted.
        largest: Largest difference of log probabilities of the same tokens after the same tokens.
    """

    refused: int = 0
    checked: int = 0
    other_tokens: int = 0
    other_logprobs: int = 0
    behind_found: int = 0
    other_behind_found: int = 0
    accepted: int = 0
    largest: float = 0.0

    def compare(self, company: Answer, alone: Answer) -> None:
        """Compare an answer among others with the one alone, and count it."""
        self.checked += 1
        self.other_tokens += company.tokens != alone.tokens
        differs = (company.tokens, company.logprobs) != (alone.tokens, alone.logprobs)
        self.other_logprobs += differs
        self.behind_found += company.num_found > 0
        self.accepted += company.num_accepted
        self.other_behind_found += differs and company.num_found > 0
        for a, b, x, y in zip(company.tokens, alone.tokens, company.logprobs, alone.logprobs, strict=False):
            if a != b:
                break
            self.largest = max(self.largest, abs(x - y))

    def __str__(self) -> str:
        refused = f"; {self.refused} more were refused" if self.refused else ""
        drafted = f" and with {self.accepted} drafted tokens" if self.accepted else ""
        without = " and without drafts" if self.accepted else ""
        if not self.other_logprobs:
            return (
                f"{self.checked} answers, {self.behind_found} of them behind a prefix that was found"
                f"{drafted}, are those of each request alone{without}, to the bit{refused}"
            )
        return (
            f"of {self.checked} answers {self.other_tokens} have other tokens than alone, "
            f"{self.other_logprobs} other log probabilities, by {self.largest:.1e} at most; "
            f"{self.other_behind_found} of these follow a prefix that was found{refused}"
        )


async def check_answers(
    client: openai.AsyncOpenAI,
    model: str,
    prompts: Sequence[str],
    new_tokens: int,
    num_clients: int,
    observe: Callable[[int], None] = lambda num_answers: None,
) -> AnswerCheck:
    """Send requests to a server, several at a time, then each answered one again, alone, and compare.

    A request that is alone has a salt of its own, so that it finds no pages of other requests. It forbids
    drafts where any answer had some.

    Args:
        client: Client of the server, without retries.
        model: Name of the model.
        prompts: Prompts of the requests.
        new_tokens: Largest number of new tokens of each answer.
        num_clients: Number of requests at a time.
        observe: Called after each answer, with the number of answers so far.

    Raises:
        openai.APIError: a request failed; one that the server has no place for among others is counted.
        UnsupportedError: an answer has no log probabilities.
    """
    check, waiting, company = AnswerCheck(), list(reversed(prompts)), list[Answer]()

    async def ask_on() -> None:
        while waiting:
            try:
                company.append(await _ask(client, model, waiting.pop(), new_tokens))
            except openai.RateLimitError:
                check.refused += 1
            observe(len(company))

    await asyncio.gather(*(ask_on() for _ in range(num_clients)))
    without: dict[str, Any] = {"drafts": False} if any(x.num_accepted for x in company) else {}
    for answer in company:
        alone = {"extra_body": {"cache_salt": secrets.token_hex(8), **without}}
        check.compare(answer, await _ask(client, model, answer.prompt, new_tokens, **alone))
        observe(len(company) + check.checked)
    return check


async def _ask(
    client: openai.AsyncOpenAI, model: str, prompt: str, new_tokens: int, **options: Any
) -> Answer:
    """A greedy answer; raises UnsupportedError if its text has no log probabilities to compare."""
    answer = Answer(prompt, new_tokens)
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=new_tokens,
        temperature=0,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    async for chunk in stream:
        answer.add(chunk)
    if answer.text and not answer.logprobs:
        raise UnsupportedError("the server must give log probabilities of completions, got none")
    return answer
