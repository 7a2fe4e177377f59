"""The answers to the prompts of one request, read piece by piece from a session."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvloom.integrations.transformers.session.choices.sampling import Choice, LogProb
from kvloom.integrations.transformers.session.requests.prompt import CHOICE, AgentTurn
from kvloom.serving import Refused
from kvloom.serving.protocol.structured import Grammar
from kvloom.serving.protocol.text import TextStream
from kvloom.serving.protocol.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one answer: its tokens and text since the last piece.

    Attributes:
        index: Index of the answer, from 0.
        text: Text that cannot change any more.
        tokens: New tokens, up to the one that completes a stop.
        offsets: Number of characters of the answer before each token.
        logprobs: Log probabilities of the tokens, if requested; ``None`` for the first token of a prompt.
        finish_reason: ``"stop"`` or ``"length"`` in the last piece of an answer.
        prompt_logprobs: Log probabilities of the prompt's tokens after the first, if requested.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    logprobs: tuple[LogProb | None, ...]
    finish_reason: str | None
    prompt_logprobs: Sequence[LogProb] = ()


@dataclass
class Answering:
    """What all answers of one session share while they are read.

    Attributes:
        manager: Manager that computes answers, unless they name another.
        tokenizer: Tokenizer of the model.
        end_tokens: Tokens that end an answer.
        device: Device of the logits.
        max_seconds: Longest time of an answer.
        on_first_token: Called with the seconds from a request to its first new token.
        readers: Answers that have not ended, by id.
        num_new: Number of new tokens of all answers.
        num_computed: Those among them that ``manager`` computed.
    """

    manager: Any
    tokenizer: Any
    end_tokens: frozenset[int]
    device: torch.device
    max_seconds: float
    on_first_token: Callable[[float], None] = lambda seconds: None
    readers: "dict[str, Answers]" = field(default_factory=dict)
    num_new: int = 0
    num_computed: int = 0


class Answers:
    """The answers to the prompts of one request.

    Args:
        reading: What they share with the other answers of their session.
        name: Id of the first answer.
        prompts: Tokens of each prompt.
        wanted: Parameters of the request.
        max_tokens: Largest number of new tokens of each answer, for each prompt.
        salt: Only requests with the same salt share pages.
        keep_special: Whether special tokens are part of the text.
        matcher: Matcher of ``Grammars``, if an answer has a structure.
        turn: Turn of an agent's session, if the request has one.
        manager: Manager that computes them; that of ``reading`` if ``None``.

    Raises:
        Refused: the session takes no requests.
    """

    def __init__(
        self,
        reading: Answering,
        name: str,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
        max_tokens: Sequence[int],
        salt: str,
        keep_special: bool,
        matcher: Any = None,
        turn: AgentTurn | None = None,
        manager: Any = None,
    ) -> None:
        self._reading, self._count, self.turn = reading, wanted.count, turn
        self._is_prompt_alone = wanted.is_prompt_alone
        self._manager = reading.manager if manager is None else manager
        self._began, self._first = time.monotonic(), True
        self._latest: dict[str, Any] = {}
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self.num_asked, self.num_new = sum(map(len, prompts)), 0
        self._answers: dict[str, _Answer] = {}
        sampling = wanted.sampling
        ends = sampling.ends(reading.end_tokens)
        for tokens in prompts:
            for choice in sampling.choices(
                wanted.count,
                len(tokens),
                reading.end_tokens,
                wanted.logprobs,
                reading.device,
                scores_prompt=wanted.echo,
            ):
                index, grammar = len(self._answers), None
                if wanted.structure is not None:
                    grammar = Grammar(wanted.structure, matcher.deep_copy(), len(tokens), reading.end_tokens)
                    choice.processors = (*choice.processors, grammar)
                text = TextStream(reading.tokenizer, wanted.stop, not keep_special, sampling.min_tokens)
                request_id = f"{name}-{index}" if index else name
                self._answers[request_id] = _Answer(index, choice, text, ends, grammar)
                reading.readers[request_id] = self
        try:
            for request_id, answer in self._answers.items():
                number = answer.index // wanted.count
                added = self._manager.add_request(
                    list(prompts[number]),
                    request_id=request_id,
                    max_new_tokens=max_tokens[number],
                    streaming=True,
                    eos_token_id=sorted(ends) or -1,
                    cache_salt=salt,
                    agent_turn=turn,
                    **{CHOICE: answer.choice},
                )
                if added is None:
                    raise Refused(503, "the session begins again, try again later")
        except BaseException:
            self.close()
            raise

    @property
    def num_found(self) -> int:
        """Number of prompt tokens whose pages were found, by the first answer to each prompt."""
        firsts = [*self._answers.values()][:: self._count]
        return sum(answer.choice.num_found or 0 for answer in firsts)

    @property
    def num_drafted(self) -> int:
        """Number of drafted tokens that steps computed for all answers."""
        return sum(answer.choice.num_drafted for answer in self._answers.values())

    @property
    def num_accepted(self) -> int:
        """Number of drafted tokens that were chosen."""
        return sum(answer.choice.num_accepted for answer in self._answers.values())

    def take(self, output: Any) -> None:
        """Take an output, which replaces the earlier output of its answer."""
        self._latest[output.request_id] = output
        self._changed.set()

    def fail(self, message: str) -> None:
        """Let ``pieces`` raise Refused with status 503."""
        self._failure = message
        self._changed.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all answers, until all have ended; closing the generator cancels them.

        Raises:
            Refused: a request failed, or takes too long.
        """
        reading = self._reading
        try:
            while any(answer.finish_reason is None for answer in self._answers.values()):
                left = self._began + reading.max_seconds - time.monotonic()
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except asyncio.TimeoutError as error:
                    raise Refused(408, "the answer took too long") from error
                self._changed.clear()
                if self._failure is not None:
                    raise Refused(503, self._failure)
                latest, self._latest = self._latest, {}
                for name, output in latest.items():
                    if output.error is not None:
                        raise Refused(503, f"the session failed: {output.error}")
                    if self._first:
                        self._first = False
                        reading.on_first_token(time.monotonic() - self._began)
                    answer = self._answers[name]
                    if answer.finish_reason is None:
                        piece = answer.read(output)
                        if self._is_prompt_alone:
                            piece = replace(
                                piece, text="", tokens=(), offsets=(), logprobs=(), finish_reason="length"
                            )
                        self._count_new(len(piece.tokens))
                        if piece.finish_reason is not None:
                            self._leave(name, ended=output.is_finished())
                        yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Cancel all answers that have not ended; their pages are released before the next step."""
        for name in self._answers:
            self._leave(name, ended=False)

    def _count_new(self, count: int) -> None:
        self.num_new += count
        self._reading.num_new += count
        if self._manager is self._reading.manager:
            self._reading.num_computed += count

    def _leave(self, name: str, ended: bool) -> None:
        if self._reading.readers.pop(name, None) is not None and not ended:
            self._manager.cancel_request(name)


class _Answer:
    """One answer while it is computed."""

    def __init__(
        self, index: int, choice: Choice, text: TextStream, ends: frozenset[int], grammar: Grammar | None
    ) -> None:
        self.index, self.choice = index, choice
        self.finish_reason: str | None = None
        self._text, self._ends, self._grammar, self._num_read = text, ends, grammar, 0

    def read(self, output: Any) -> Piece:
        """The new piece of an output; raises Refused if a grammar could not be followed to its end."""
        if self._grammar is not None and self._grammar.failure is not None:
            raise Refused(400, self._grammar.failure)
        start, tokens = self._num_read, output.generated_tokens
        text = self._text.feed(tokens[start:])
        if output.is_finished():
            text += self._text.end(tokens)
        if self._text.stopped or (output.is_finished() and tokens[-1] in self._ends):
            self.finish_reason = "stop"
        elif output.is_finished():
            self.finish_reason = "length"
        offsets = self._text.offsets
        new = slice(start, len(offsets))
        self._num_read = len(offsets)
        logprobs = tuple(self.choice.logprobs[new])
        return Piece(
            self.index,
            text,
            tuple(tokens[new]),
            tuple(offsets[new]),
            logprobs,
            self.finish_reason,
            self.choice.prompt_logprobs,
        )
