"""Whether answers in company are those that a server gives each request alone, bit for bit."""

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
        prompt: Of the request.
        new_tokens: That were asked for.
        tokens: Of the answer, as texts.
        logprobs: Natural logarithms of their probabilities.
        num_found: Tokens of the prompt that the server found in its pages.
        text: Of the answer.
    """

    prompt: str
    new_tokens: int
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_found: int = 0
    text: str = ""

    def add(self, choice: Any) -> None:
        """The text and the tokens of the answer, or of a chunk of it."""
        self.text += choice.text
        if choice.logprobs is not None:
            self.tokens += choice.logprobs.tokens or []
            self.logprobs += choice.logprobs.token_logprobs or []

    def expect_logprobs(self) -> None:
        """Raise UnsupportedError if a text has no log probabilities, as then nothing is compared."""
        if self.text and not self.logprobs:
            raise UnsupportedError("the server must give log probabilities of completions, got none")


@dataclass(slots=True)
class AnswerCheck:
    """How many answers differ.

    Attributes:
        checked: Answers that were compared.
        other_tokens: Those of them that have other tokens.
        other_logprobs: Those that have other log probabilities, those with other tokens among them.
        other_behind_found: Those of them whose prompts began with what was found.
        largest: Difference of log probabilities of the same tokens after the same tokens.
    """

    checked: int = 0
    other_tokens: int = 0
    other_logprobs: int = 0
    other_behind_found: int = 0
    largest: float = 0.0

    def compare(self, company: Answer, alone: Answer) -> None:
        """Count one more answer."""
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
    """Ask for each answer again, one after the other, and compare.

    Each is asked under a salt of its own, so that nothing of its prompt is found that company computed.

    Args:
        client: Of the server.
        model: Name.
        answers: That were given in company, greedy.
        observe: Called after each of them.

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
