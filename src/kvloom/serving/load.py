"""Load of concurrent clients on a server, and their measurements."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import openai

from kvloom.serving.answer_check import Answer
from kvloom.serving.workloads import Conversation, Turn

Observer = Callable[["Measured"], None]


@dataclass(slots=True)
class Measured:
    """Measurements of clients.

    Attributes:
        ended: Number of requests that were answered.
        refused: Number of requests for which the server had no place.
        errors: Messages of requests that failed.
        prompt_tokens: Number of prompt tokens, by the server's count.
        found_tokens: Number of prompt tokens that the server found in its pages.
        new_tokens: Number of new tokens of all answers.
        first_token: Seconds from each request to its first text.
        between_tokens: Seconds from each text to the next one of its answer.
        seconds: Seconds from the first request to the last answer.
        answers: Answers with their log probabilities, if requested, else ``None``.
    """

    ended: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    found_tokens: int = 0
    new_tokens: int = 0
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0
    answers: list[Answer] | None = None

    def summary(self) -> dict[str, Any]:
        """Counts, rates and percentiles; times in milliseconds."""
        seconds = max(self.seconds, 1e-9)
        return {
            "ended": self.ended,
            "refused": self.refused,
            "failed": len(self.errors),
            "seconds": self.seconds,
            "requests_per_s": self.ended / seconds,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "new_tokens_per_s": self.new_tokens / seconds,
            "hit_rate": self.found_tokens / max(self.prompt_tokens, 1),
            "first_token_ms": percentiles(self.first_token),
            "between_tokens_ms": percentiles(self.between_tokens),
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile in milliseconds; 0 without values."""
    ordered = sorted(seconds) or [0.0]
    return {f"p{p}": 1000 * ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 90, 99)}


async def measure(
    client: openai.AsyncOpenAI,
    model: str,
    conversations: Iterable[Conversation],
    num_clients: int,
    observe: Observer = lambda measured: None,
    *,
    keep_answers: bool = False,
) -> Measured:
    """Send conversations to a server by ``num_clients`` clients, each with one conversation at a time.

    Args:
        client: Client of the server, without retries.
        model: Name of the model.
        conversations: Conversations in order of their ``seconds``.
        num_clients: Number of concurrent clients.
        observe: Called after each request.
        keep_answers: Whether log probabilities are requested, and answers are kept.

    Returns:
        Measurements of the requests that were answered.
    """
    measured = Measured(answers=[] if keep_answers else None)
    waiting, began = deque(conversations), time.perf_counter()

    async def ask_on() -> None:
        while waiting:
            conversation = waiting.popleft()
            await asyncio.sleep(began + conversation.seconds - time.perf_counter())
            text = ""
            for turn in conversation.turns:
                text += turn.text
                answer = await _ask(client, model, text, turn, measured)
                measured.seconds = time.perf_counter() - began
                observe(measured)
                if answer is None:
                    break
                text += answer

    await asyncio.gather(*(ask_on() for _ in range(num_clients)))
    return measured


async def _ask(
    client: openai.AsyncOpenAI, model: str, prompt: str, turn: Turn, measured: Measured
) -> str | None:
    """Send one request; returns the text of the answer, or ``None`` if there is none."""
    times, text, usage = [time.perf_counter()], "", None
    answer = Answer(prompt, turn.new_tokens)
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=turn.new_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=openai.omit if measured.answers is None else 0,
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices:
                answer.add(chunk.choices[0])
            if chunk.choices and chunk.choices[0].text:
                times.append(time.perf_counter())
                text += chunk.choices[0].text
    except openai.RateLimitError:
        measured.refused += 1
        return None
    except openai.APIError as error:
        measured.errors.append(str(error))
        return None
    measured.ended += 1
    gaps = [after - before for before, after in pairwise(times)]
    measured.first_token += gaps[:1]
    measured.between_tokens += gaps[1:]
    if usage is not None:
        details = usage.prompt_tokens_details
        measured.prompt_tokens += usage.prompt_tokens
        measured.new_tokens += usage.completion_tokens
        answer.num_found = (details and details.cached_tokens) or 0
        measured.found_tokens += answer.num_found
    if measured.answers is not None:
        measured.answers.append(answer)
    return text
