"""Check that a server gives a request the same answer among others as alone, bit for bit."""

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
        text: Text of the answer.
    """

    prompt: str
    new_tokens: int
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_found: int = 0
    text: str = ""

    def add(self, choice: Any) -> None:
        """Add the text and the tokens of the answer, or of a chunk of it."""
        self.text += choice.text
        if choice.logprobs is not None:
            self.tokens += choice.logprobs.tokens or []
            self.logprobs += choice.logprobs.token_logprobs or []

    def expect_logprobs(self) -> None:
        """Raise UnsupportedError if a text has no log probabilities, since there is nothing to compare."""
        if self.text and not self.logprobs:
            raise UnsupportedError("the server must give log probabilities of completions, got none")


@dataclass(slots=True)
class AnswerCheck:
    """Counts of compared answers, and of those that differ.

    Attributes:
        checked: Number of compared answers.
        other_tokens: Number of answers with other tokens.
        other_logprobs: Number of answers with other log probabilities, including those with other tokens.
        other_behind_found: Number of the latter whose prompts began with a found prefix.
        largest: Largest difference of log probabilities of the same tokens after the same tokens.
    """

    checked: int = 0
    other_tokens: int = 0
    other_logprobs: int = 0
    other_behind_found: int = 0
    largest: float = 0.0

    def compare(self, company: Answer, alone: Answer) -> None:
        """Compare an answer among others with the one alone, and count it."""
        self.checked += 1
        self.other_tokens += company.tokens != alone.tokens
        differs = (company.tokens, company.logprobs) != (alone.tokens, alone.logprobs)
        self.other_logprobs += differs
        self.other_behind_found += differs and company.num_found > 0
        for a, b, x, y in zip(company.tokens, alone.tokens, company.logprobs, alone.logprobs, strict=False):
            if a != b:
                break
            self.largest = max(self.largest, abs(x - y))

    def __str__(self) -> str:
        if not self.other_logprobs:
            return f"{self.checked} answers are those of each request alone, to the bit"
        return (
            f"of {self.checked} answers {self.other_tokens} have other tokens than alone, "
            f"{self.other_logprobs} other log probabilities, by {self.largest:.1e} at most; "
            f"{self.other_behind_found} of these follow a prefix that was found"
        )


async def check_answers(
    client: openai.AsyncOpenAI,
    model: str,
    answers: Sequence[Answer],
    observe: Callable[[AnswerCheck], None] = lambda check: None,
) -> AnswerCheck:
    """Request each answer again, one after the other, and compare.

    Each request has its own salt, so that it finds no pages of other requests.

    Args:
        client: Client of the server.
        model: Name of the model.
        answers: Greedy answers that were given among others.
        observe: Called after each answer.

    Raises:
        openai.APIError: a request was not answered.
        UnsupportedError: an answer has no log probabilities.
    """
    check = AnswerCheck()
    for answer in answers:
        alone = Answer(answer.prompt, answer.new_tokens)
        done = await client.completions.create(
            model=model,
            prompt=answer.prompt,
            max_tokens=answer.new_tokens,
            temperature=0,
            logprobs=0,
            extra_body={"cache_salt": secrets.token_hex(8)},
        )
        alone.add(done.choices[0])
        for each in (answer, alone):
            each.expect_logprobs()
        check.compare(answer, alone)
        observe(check)
    return check
