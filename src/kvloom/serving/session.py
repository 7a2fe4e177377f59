"""The session of a server: answers to requests, piece by piece, from one model."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers import continuous_batching, summary_of
from kvloom.integrations.transformers.batching.agent_sessions import AgentSessions, AgentTurn
from kvloom.integrations.transformers.batching.config import expect_known
from kvloom.integrations.transformers.batching.report import BatchReport
from kvloom.integrations.transformers.batching.sampling import choose_by_request
from kvloom.integrations.transformers.text_config import text_config_of
from kvloom.serving import Refused
from kvloom.serving.answers import Answers
from kvloom.serving.picture_chats import PictureChats, picture_chats
from kvloom.serving.prompts import Prompts, expect_room
from kvloom.serving.settings import PICTURE_TOKENS, Settings
from kvloom.serving.structured import Grammars
from kvloom.serving.vision import PicturePrompt
from kvloom.serving.wanted import Wanted
from kvloom.store.store import KVStore, open_store

_LOG: Final = logging.getLogger("kvloom")

_LOOK_SECONDS: Final = 0.1
"""Between two looks at whether the session lives."""

_MOST_DEATHS: Final = 3
"""After so many without a new token between them it does not begin again."""

_FIELD_BYTES: Final = 64 << 10
"""Of a request beside its prompt."""

_TOKEN_BYTES: Final = 64
"""Of a request for each token that a prompt may have: far more than tokens take, escaped as well."""


class Session:
    """A running session of continuous batching, whose answers are read in one event loop.

    Args:
        model: What ``load_model`` returns.
        tokenizer: The same.
        settings: Of the server.
        config: A ``ContinuousBatchingConfig``.
        on_first_token: Called with the seconds from a request to its first new token.
        kv: As of ``continuous_batching``.
        values: The same.
        policy: The same.
        batch_invariant: The same.
        pack: The same.
        store: The same.
        processor: That makes what the model sees of pictures; ``None`` for text alone.
        picture_tokens: Of chats with pictures that are kept at a time.

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
        values: str | None = None,
        policy: str = "lru",
        batch_invariant: bool | None = None,
        pack: bool | str = False,
        store: KVStore | Sequence[str] | None = None,
        processor: Any = None,
        picture_tokens: int = PICTURE_TOKENS,
    ) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ArgumentError(f"model must have a fast tokenizer, got {type(tokenizer).__name__}")
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        tokenizer("")  # drops what its file says of truncation: from now on threads may share it
        self.prompts = Prompts(tokenizer)
        self.on_first_token = on_first_token
        self._batch_invariant = batch_invariant
        self.store = None if store is None else open_store(store)
        self.pictures: PictureChats | None = None
        """What answers chats with pictures; ``None`` where the model answers text alone."""
        if processor is not None:
            if pack == "only":
                raise ArgumentError("pack must be another than 'only' for a model that sees, got 'only'")
            how: dict[str, Any] = {"kv": kv, "values": values, "policy": policy}
            args = (model, tokenizer, processor, picture_tokens)
            self.pictures = picture_chats(*args, **how, batch_invariant=batch_invariant)
        layers: dict[str, Any] = {"batch_invariant": batch_invariant, "pack": pack}
        continuous_batching(model, kv, values=values, policy=policy, **layers, store=self.store)
        eos = model.generation_config.eos_token_id
        ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self.end_tokens = frozenset(ends)
        greedy = GenerationConfig(do_sample=False, eos_token_id=ends or -1)  # what each request overrides
        self.grammars = Grammars(tokenizer, ends, _num_logits(model))
        self.manager = model.init_continuous_batching(greedy, config)
        self.manager.agents = AgentSessions(
            settings.session_share, max(len({*settings.api_keys}), 1), settings.session_seconds
        )
        choose_by_request(self.manager)
        self.readers: dict[str, Answers] = {}
        self.num_new = 0
        """New tokens of all answers."""
        self.num_restarts = 0
        """How often the session died and began anew."""
        self.failure: str | None = None
        """Why it has ended for good."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the event loop when it has."""
        self.room = 0
        """Tokens of a prompt and its answer, at most; 0 before ``start``."""
        self.num_placed = 0
        """Answers whose prompts are being read."""
        self._num_deaths = 0  # since the last new token
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether steps are computed."""
        return bool(self.manager.is_running() and self.manager.background_thread_status.fatal_error is None)

    @property
    def num_taken(self) -> int:
        """Places of answers that are computed, wait, or whose prompts are being read."""
        return len(self.readers) + self.num_placed

    def report(self) -> BatchReport:
        """Pages and counts of this moment."""
        report: BatchReport = self.manager.report()
        return report

    async def start(self) -> None:
        """Begin, in the event loop that is to read the answers.

        Raises:
            StateError: it ended at once.
        """
        self.manager.output_router = _Router(self, asyncio.get_running_loop())
        if self.pictures is not None:
            self.pictures.start(self.readers)
        await self._begin()
        if not self.alive:
            self.failure = f"the session could not begin: {self._why_it_died()}"
            raise StateError(self.failure)
        self._tell_what_layers_are_not()
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Cancel what is running, and end; the layers of the model are as they were before."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        self.prompts.close()
        for answers in set(self.readers.values()):
            answers.close()
        if self.pictures is not None:
            await asyncio.to_thread(self.pictures.close)
        await asyncio.to_thread(self.manager.stop, hard_stop=True)
        if not self.manager.is_running():
            await asyncio.to_thread(continuous_batching, self.model, None)
        if self.store is not None:
            await asyncio.to_thread(self.store.close)

    def _tell_what_layers_are_not(self) -> None:
        """Log which layers are not what was asked for; a warning where that is said, and none is."""
        report = self.report()
        if report.not_packed:
            level = logging.INFO if report.packed_bytes else logging.WARNING
            _LOG.log(level, "linear layers that are not packed: %s", _listed(report.not_packed))
        if report.not_invariant:
            level = logging.WARNING if self._batch_invariant else logging.INFO
            _LOG.log(level, "layers that are not batch invariant: %s", _listed(report.not_invariant))

    async def _begin(self) -> None:
        self.manager.start()
        while self.manager.batch_processor is None and self.alive:  # the pages are made by its thread
            await asyncio.sleep(0.005)
        report = self.report()
        longest = getattr(text_config_of(self.model), "max_position_embeddings", None)
        self.room = report.max_pages * report.page_size
        self.room = min(self.room, longest or self.room, self.manager.most_positions or self.room)

    async def _supervise(self) -> None:
        """Let the session begin again, with new pages, when it has died; end it if that does not help."""
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                if self.alive:
                    continue
                reason = self._why_it_died()
                for answers in set(self.readers.values()):
                    answers.fail(f"the session failed: {reason}")
                self._num_deaths += 1
                if self._num_deaths == _MOST_DEATHS:
                    return self._end(f"{reason}, {_MOST_DEATHS} times without a new token between")
                _LOG.error("the session died and begins again with new pages: %s", reason)
                await self._begin_again()
        except Exception as error:
            self._end(summary_of(error))

    def _end(self, reason: str) -> None:
        self.failure = f"the session ended: {reason}"
        self.on_failure()

    async def _begin_again(self) -> None:
        recorded = self.manager.events
        await asyncio.to_thread(self.manager.stop, hard_stop=True)
        await asyncio.to_thread(_expect_device, self.model.device)
        self.manager.switch_to_cb_friendly_attn(self.model)
        await self._begin()
        if recorded is not None:
            self.manager.record(recorded.capacity)
        self.num_restarts += 1

    def _why_it_died(self) -> str:
        error = self.manager.background_thread_status.fatal_error
        return "its thread ended" if error is None else summary_of(error)

    def note_new_tokens(self, count: int, lives: bool) -> None:
        """Count what was read; ``lives`` is whether the session computed it."""
        self.num_new += count
        self._num_deaths = 0 if lives else self._num_deaths

    @property
    def max_body_bytes(self) -> int:
        """The most bytes of a body whose prompt could fit, or which may have pictures."""
        if self.pictures is not None:
            return self.settings.max_body_bytes
        return min(self.settings.max_body_bytes, _FIELD_BYTES + _TOKEN_BYTES * self.room)

    def expect_alive(self) -> None:
        """Raise Refused unless answers may begin."""
        if not self.alive:
            raise Refused(503, "the session begins again, try again later")

    def ask(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
        salt: str,
        *,
        keep_special: bool = False,
        usual_tokens: int | None = None,
        matcher: Any = None,
        turn: AgentTurn | None = None,
        pictures: PicturePrompt | None = None,
    ) -> Answers:
        """Begin the answers to prompts, in a ``Place``; whoever asks reads ``pieces`` or calls ``close``.

        Args:
            name: By which the first answer is known, a new one; ``-1`` and so on are added for the others.
            prompts: Tokens of each.
            wanted: What was asked for.
            salt: Only requests of one salt share pages.
            keep_special: Whether special tokens are text.
            usual_tokens: New tokens where the request does not say how many; as many as there may be if
                ``None``.
            matcher: Of ``grammars``, if an answer has a structure.
            turn: Of the session of an agent, if the request is of one.
            pictures: The only prompt, if it has pictures.

        Raises:
            ArgumentError: a prompt is empty, or it is too long, alone or with the new tokens, or it or
                another field has a token that the model does not know.
            Refused: there is no session.
        """
        self.expect_alive()
        for field, named in wanted.sampling.named_tokens().items():
            expect_known(field, named, self.model)
        room, manager = self.room, self.manager
        if pictures is not None and self.pictures is not None:
            room, manager = self.pictures.room, self.pictures.of(pictures)
        counts = [self._num_new_tokens(tokens, wanted, usual_tokens, room) for tokens in prompts]
        return Answers(self, name, prompts, wanted, counts, salt, keep_special, matcher, turn, manager)

    def _num_new_tokens(
        self, tokens: Sequence[int], wanted: Wanted, usual_tokens: int | None, most: int
    ) -> int:
        """The most new tokens for a prompt, of ``most`` together with it."""
        if not tokens:
            raise ArgumentError("the prompt must be at least one token, got none")
        expect_room(most, len(tokens))
        expect_known("the prompt", tokens, self.model)
        room, count, least = most - len(tokens), wanted.max_tokens, wanted.sampling.min_tokens
        if count is None:
            count = min(usual_tokens or room, self.settings.max_tokens, room)
        if count > self.settings.max_tokens:
            raise ArgumentError(f"max_tokens must be at most {self.settings.max_tokens}, got {count}")
        if count > room:
            raise ArgumentError(
                f"the prompt and max_tokens must be at most {most} tokens together, "
                f"got {len(tokens)} and {count}"
            )
        if least > count:
            raise ArgumentError(f"min_tokens must be at most max_tokens, which are {count}, got {least}")
        return count


class Place:
    """A place among the answers of a session, from before its prompt is read until ``ask`` has begun it.

    Args:
        session: Whose.

    Raises:
        Refused: there is none, or no session.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._count = session, 0
        session.expect_alive()
        self.widen(1)

    def widen(self, count: int) -> None:
        """Have ``count`` places; raises Refused if there are not so many now, ArgumentError if never."""
        session, more = self._session, count - self._count
        if count > session.settings.max_answers:
            raise ArgumentError(
                f"the answers to all prompts must be at most {session.settings.max_answers}, got {count}"
            )
        taken = session.num_taken
        if taken + more > session.settings.max_answers:
            raise Refused(429, f"{taken - self._count} answers are being computed, try again later")
        session.num_placed += more
        self._count = count

    def close(self) -> None:
        """Give the places back."""
        self._session.num_placed -= self._count


def _num_logits(model: Any) -> int:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(text_config_of(model).vocab_size if weight is None else weight.shape[0])


def _listed(counts: dict[str, int]) -> str:
    return "; ".join(f"{count}, {reason}" for reason, count in counts.items())


def _expect_device(device: torch.device) -> None:
    """Raise what a device raises that computes nothing any more."""
    torch.zeros(1, device=device).add_(1).item()


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
