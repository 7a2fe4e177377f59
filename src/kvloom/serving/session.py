"""The session behind a server: answers to requests, piece by piece, from one model."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.batching.report import BatchReport
from kvloom.integrations.transformers.batching.sampling import CHOICE, Choice, LogProb, choose_by_request
from kvloom.integrations.transformers.build import text_config_of
from kvloom.serving import Refused
from kvloom.serving.settings import Settings
from kvloom.serving.text import TextStream
from kvloom.serving.wanted import Wanted

_USUAL_TOKENS: Final = 1024
"""New tokens where a request does not say how many."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one answer since its last piece.

    Attributes:
        index: Of the answer, from 0.
        text: Certain text.
        tokens: New tokens.
        logprobs: Theirs, if they were asked for.
        finish_reason: ``"stop"`` or ``"length"`` in the last piece of an answer.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[LogProb, ...]
    finish_reason: str | None


class Session:
    """A running session of continuous batching, whose answers are read in one event loop.

    Args:
        model: What ``load_model`` returns.
        tokenizer: The same.
        settings: Of the server.
        config: A ``ContinuousBatchingConfig``.
        on_first_token: Called with the seconds from a request to its first new token.
        kv: As of ``continuous_batching``.
        policy: The same.

    Raises:
        KVError: the model, an option or the configuration cannot be served.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        config: ContinuousBatchingConfig,
        *,
        on_first_token: Callable[[float], None] = lambda seconds: None,
        kv: str = "auto",
        policy: str = "lru",
    ) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ArgumentError(f"model must have a fast tokenizer, got {type(tokenizer).__name__}")
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        tokenizer("")  # drops what its file says of truncation: from now on threads may share it
        self.on_first_token = on_first_token
        continuous_batching(model, kv, policy=policy)
        eos = model.generation_config.eos_token_id
        ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self.end_tokens = frozenset(ends)
        greedy = GenerationConfig(do_sample=False, eos_token_id=ends or -1)  # what each request overrides
        self.manager = model.init_continuous_batching(greedy, config)
        choose_by_request(self.manager)
        self.readers: dict[str, Answers] = {}
        self.num_new = 0
        """New tokens of all answers."""
        self._room = 0

    @property
    def alive(self) -> bool:
        """Whether steps are computed."""
        return bool(self.manager.is_running() and self.manager.background_thread_status.fatal_error is None)

    def report(self) -> BatchReport:
        """Pages and counts of this moment."""
        report: BatchReport = self.manager.report()
        return report

    async def start(self) -> None:
        """Begin, in the event loop that is to read the answers."""
        self.manager.output_router = _Router(self, asyncio.get_running_loop())
        self.manager.start()
        while not self.report().max_pages and self.alive:  # the pages are made by its thread
            await asyncio.sleep(0.005)
        report = self.report()
        longest = getattr(text_config_of(self.model), "max_position_embeddings", None)
        self._room = report.max_pages * report.page_size
        self._room = min(self._room, longest or self._room)

    async def stop(self) -> None:
        """Give up what is running, and end."""
        for answers in set(self.readers.values()):
            answers.close()
        await asyncio.to_thread(self.manager.stop, hard_stop=True)

    def expect_place(self, count: int) -> None:
        """Raise Refused unless ``count`` answers more may begin."""
        if not self.alive:
            raise Refused(503, "the session has ended")
        if len(self.readers) + count > self.settings.max_answers:
            raise Refused(429, f"{len(self.readers)} answers are being computed, try again later")

    def ask(
        self, name: str, tokens: Sequence[int], wanted: Wanted, salt: str, keep_special: bool = False
    ) -> "Answers":
        """Begin the answers to a prompt; whoever asks reads ``pieces`` or calls ``close``.

        Args:
            name: By which the first answer is known, a new one; ``-1`` and so on are added for the others.
            tokens: Of the prompt.
            wanted: What was asked for.
            salt: Only requests of one salt share pages.
            keep_special: Whether special tokens are text.

        Raises:
            ArgumentError: the prompt is empty, or it is too long, alone or with the new tokens.
            Refused: there is too much to do, or no session.
        """
        self.expect_place(wanted.count)
        if not tokens:
            raise ArgumentError("the prompt must be at least one token, got none")
        room = self._room - len(tokens)
        if room < 1:
            raise ArgumentError(f"the prompt must be at most {self._room - 1} tokens, got {len(tokens)}")
        count = wanted.max_tokens
        if count is None:
            count = min(_USUAL_TOKENS, self.settings.max_tokens, room)
        if count > self.settings.max_tokens:
            raise ArgumentError(f"max_tokens must be at most {self.settings.max_tokens}, got {count}")
        if count > room:
            raise ArgumentError(
                f"the prompt and max_tokens must be at most {self._room} tokens together, "
                f"got {len(tokens)} and {count}"
            )
        return Answers(self, name, tokens, wanted, count, salt, keep_special)


class _Router(OutputRouter):  # type: ignore[misc]
    """Hands outputs to those who read them, of whom each sees the latest only: it has all tokens."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._session, self._loop = session, loop

    def deliver(self, output: Any) -> None:
        """From the thread of the session."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        """From the thread of the session."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give, outputs)

    def _give(self, outputs: list[Any]) -> None:
        for output in outputs:
            reader = self._session.readers.get(output.request_id)
            if reader is not None:
                reader.take(output)
            elif not output.is_finished():  # cancelled before the session had heard of it
                self._session.manager.cancel_request(output.request_id)


class Answers:
    """The answers to one prompt.

    Args:
        session: Whose.
        name: By which the first answer is known.
        tokens: Of the prompt.
        wanted: What was asked for.
        max_tokens: New tokens of each.
        salt: Only requests of one salt share pages.
        keep_special: Whether special tokens are text.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        tokens: Sequence[int],
        wanted: Wanted,
        max_tokens: int,
        salt: str,
        keep_special: bool,
    ) -> None:
        self._session, self._max_tokens = session, max_tokens
        self._began, self._first = time.monotonic(), True
        self._latest: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self.num_asked, self.num_new = len(tokens), 0
        self._answers: dict[str, _Answer] = {}
        seed = random.getrandbits(63) if wanted.seed is None else wanted.seed
        for index in range(wanted.count):
            choice = Choice(wanted.temperature, wanted.top_p, wanted.top_k, seed + index, wanted.logprobs)
            text = TextStream(session.tokenizer, wanted.stop, not keep_special)
            request_id = f"{name}-{index}" if index else name
            self._answers[request_id] = _Answer(index, choice, text)
            session.readers[request_id] = self
        try:
            for request_id, answer in self._answers.items():
                added = session.manager.add_request(
                    list(tokens),
                    request_id=request_id,
                    max_new_tokens=max_tokens,
                    streaming=True,
                    cache_salt=salt,
                    **{CHOICE: answer.choice},
                )
                if added is None:
                    raise Refused(503, "the session has ended")
        except BaseException:
            self.close()
            raise

    @property
    def num_found(self) -> int:
        """Tokens of the prompt whose pages were found by the first answer."""
        return next(iter(self._answers.values())).choice.num_found or 0

    def take(self, output: Any) -> None:
        """An output that replaces the one before it."""
        self._latest[output.request_id] = output
        self._changed.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """What comes of all answers, until all have ended; whatever ends it ends them.

        Raises:
            Refused: a request failed, or takes too long.
        """
        session = self._session
        try:
            while any(answer.finish_reason is None for answer in self._answers.values()):
                left = self._began + session.settings.max_seconds - time.monotonic()
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except asyncio.TimeoutError as error:
                    raise Refused(408, "the answer took too long") from error
                self._changed.clear()
                latest, self._latest = self._latest, {}
                for name, output in latest.items():
                    if output.error is not None:
                        raise Refused(503, f"the session failed: {output.error}")
                    if self._first:
                        self._first = False
                        session.on_first_token(time.monotonic() - self._began)
                    answer = self._answers[name]
                    if answer.finish_reason is None:
                        piece = answer.read(output, session.end_tokens)
                        self.num_new += len(piece.tokens)
                        session.num_new += len(piece.tokens)
                        if piece.finish_reason is not None:
                            self._leave(name, ended=output.is_finished())
                        yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Give up whatever has not ended; its pages are free before the next step."""
        for name in self._answers:
            self._leave(name, ended=False)

    def _leave(self, name: str, ended: bool) -> None:
        if self._session.readers.pop(name, None) is not None and not ended:
            self._session.manager.cancel_request(name)


class _Answer:
    """One answer while it comes."""

    def __init__(self, index: int, choice: Choice, text: TextStream) -> None:
        self.choice = choice
        self.finish_reason: str | None = None
        self._index, self._text, self._num_read = index, text, 0

    def read(self, output: Any, end_tokens: frozenset[int]) -> Piece:
        """What is new in an output."""
        start, tokens = self._num_read, output.generated_tokens
        self._num_read = len(tokens)
        text = self._text.feed(tokens[start:])
        if output.is_finished():
            text += self._text.end(tokens)
        if self._text.stopped or (output.is_finished() and tokens[-1] in end_tokens):
            self.finish_reason = "stop"
        elif output.is_finished():
            self.finish_reason = "length"
        logprobs = tuple(self.choice.logprobs[start : self._num_read])
        return Piece(self._index, text, tuple(tokens[start:]), logprobs, self.finish_reason)
