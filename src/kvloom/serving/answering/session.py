"""The session of a server, which answers requests with one model."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers import continuous_batching, summary_of
from kvloom.integrations.transformers.models.text_config import text_config_of, token_ids_in
from kvloom.integrations.transformers.session.choices.sampling import choose_by_request
from kvloom.integrations.transformers.session.config import expect_known
from kvloom.integrations.transformers.session.report import BatchReport
from kvloom.integrations.transformers.session.requests.agent_sessions import AgentSessions
from kvloom.integrations.transformers.session.requests.prompt import AgentTurn
from kvloom.serving import Refused
from kvloom.serving.answering.answers import Answering, Answers
from kvloom.serving.answering.picture_chats import PictureChats, picture_chats
from kvloom.serving.answering.prompts import Prompts, expect_room
from kvloom.serving.answering.vision import PicturePrompt
from kvloom.serving.protocol.structured import Grammars
from kvloom.serving.protocol.wanted import Wanted
from kvloom.serving.settings import PICTURE_TOKENS, Settings
from kvloom.store.store import KVStore, open_store

_LOG: Final = logging.getLogger("kvloom")

_LOOK_SECONDS: Final = 0.1
"""Time between two checks that the session is alive."""

_MOST_DEATHS: Final = 3
"""Number of failures without a new token between them after which a session is not restarted."""

_FIELD_BYTES: Final = 64 << 10
"""Largest number of bytes of a request beside its prompt."""

_TOKEN_BYTES: Final = 64
"""Bytes of a request for each token that a prompt may have, far more than tokens take, even if escaped."""


class ServingSession:
    """A running session of continuous batching, whose answers are read in one event loop.

    Args:
        model: Model from ``load_model``.
        tokenizer: Tokenizer from ``load_model``.
        settings: Settings of the server.
        config: A ``ContinuousBatchingConfig``.
        kv, values, policy, batch_invariant, pack, store, drafts: As in ``continuous_batching``.
        processor: Processor of pictures for the model; ``None`` for text alone.
        picture_tokens: Largest number of kept tokens of chats with pictures.

    Raises:
        KVError: the model, an option or the configuration is not supported.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        config: ContinuousBatchingConfig,
        *,
        kv: str = "auto",
        values: str | None = None,
        policy: str = "lru",
        batch_invariant: bool | None = None,
        pack: bool | str = False,
        store: KVStore | Sequence[str] | None = None,
        drafts: PreTrainedModel | str | None = None,
        processor: Any = None,
        picture_tokens: int = PICTURE_TOKENS,
    ) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ArgumentError(f"model must have a fast tokenizer, got {type(tokenizer).__name__}")
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        tokenizer("")  # resets the truncation of its file; threads may share it afterwards
        self.prompts = Prompts(tokenizer)
        self._batch_invariant = batch_invariant
        self.store = None if store is None else open_store(store)
        self.pictures: PictureChats | None = None
        """Queue of chats with pictures; ``None`` if the model answers only text."""
        if processor is not None:
            if pack == "only":
                raise ArgumentError(
                    "pack must be other than 'only' for a model that takes pictures, got 'only'"
                )
            how: dict[str, Any] = {"kv": kv, "values": values, "policy": policy}
            args = (model, tokenizer, processor, picture_tokens)
            self.pictures = picture_chats(*args, **how, batch_invariant=batch_invariant)
        layers: dict[str, Any] = {"batch_invariant": batch_invariant, "pack": pack}
        continuous_batching(
            model, kv, values=values, policy=policy, **layers, store=self.store, drafts=drafts
        )
        ends = token_ids_in(model.generation_config.eos_token_id)
        greedy = GenerationConfig(do_sample=False, eos_token_id=ends or -1)  # each request overrides it
        self.grammars = Grammars(tokenizer, ends, _num_logits(model))
        self.manager = model.init_continuous_batching(greedy, config)
        self.manager.agents = AgentSessions(
            settings.session_share, max(len({*settings.api_keys}), 1), settings.session_seconds
        )
        choose_by_request(self.manager)
        self.reading = Answering(self.manager, tokenizer, frozenset(ends), model.device, settings.max_seconds)
        self.num_restarts = 0
        """Number of restarts after a failure."""
        self.failure: str | None = None
        """Why the session has ended for good; ``None`` if it has not."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the event loop when it has ended for good."""
        self.room = 0
        """Largest number of tokens of a prompt and its answer; 0 before ``start``."""
        self.num_placed = 0
        """Number of answers whose prompts are being read."""
        self._num_deaths = 0  # since the last new token
        self._num_then = 0  # new tokens until the last of them
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether steps are computed."""
        return bool(self.manager.is_running() and self.manager.background_thread_status.fatal_error is None)

    @property
    def readers(self) -> dict[str, Answers]:
        """The answers that have not ended, by id."""
        return self.reading.readers

    @property
    def num_new(self) -> int:
        """Number of new tokens of all answers."""
        return self.reading.num_new

    @property
    def num_taken(self) -> int:
        """Number of answers that are computed, wait, or whose prompts are being read."""
        return len(self.readers) + self.num_placed

    def report(self) -> BatchReport:
        """Report of the present pages and counts."""
        report: BatchReport = self.manager.report()
        return report

    async def start(self) -> None:
        """Start in the event loop that reads the answers.

        Raises:
            StateError: the session ended at once.
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
        """Cancel all answers, end the session, and restore the layers of the model."""
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
        """Log layers that are not packed (a warning if none is) or not invariant (a warning if requested)."""
        report = self.report()
        if report.not_packed:
            level = logging.INFO if report.packed_bytes else logging.WARNING
            _LOG.log(level, "linear layers that are not packed: %s", _listed(report.not_packed))
        if report.not_invariant:
            level = logging.WARNING if self._batch_invariant else logging.INFO
            _LOG.log(level, "layers that are not batch invariant: %s", _listed(report.not_invariant))

    async def _begin(self) -> None:
        self.manager.start()
        while self.manager.batch_processor is None and self.alive:  # its thread allocates the pages
            await asyncio.sleep(0.005)
        report = self.report()
        longest = getattr(text_config_of(self.model), "max_position_embeddings", None)
        self.room = report.max_pages * report.page_size
        self.room = min(self.room, longest or self.room, self.manager.most_positions or self.room)

    async def _supervise(self) -> None:
        """Restart the session with new pages after a failure; end it if it fails repeatedly."""
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                if self.alive:
                    continue
                reason = self._why_it_died()
                for answers in set(self.readers.values()):
                    answers.fail(f"the session failed: {reason}")
                computed = self.reading.num_computed
                self._num_deaths = 1 if computed > self._num_then else self._num_deaths + 1
                self._num_then = computed
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

    @property
    def max_body_bytes(self) -> int:
        """Largest number of bytes of a body, by the setting, and without pictures also by ``room``."""
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
        """Begin the answers to prompts, within a ``Place``; the caller reads ``pieces`` or calls ``close``.

        Args:
            name: New id of the first answer; the others have the suffixes ``-1`` and so on.
            prompts: Tokens of each prompt.
            wanted: Parameters of the request.
            salt: Only requests with the same salt share pages.
            keep_special: Whether special tokens are part of the text.
            usual_tokens: Default number of new tokens; as many as possible if ``None``.
            matcher: Matcher of ``grammars``, if an answer has a structure.
            turn: Turn of an agent's session, if the request has one.
            pictures: The only prompt, if it has pictures.

        Raises:
            ArgumentError: a prompt is empty, or too long, alone or with the new tokens; or a prompt or a
                field has a token that the model does not have.
            Refused: the session is not alive.
        """
        self.expect_alive()
        for field, named in wanted.sampling.named_tokens().items():
            expect_known(field, named, self.model)
        room, manager = self.room, self.manager
        if pictures is not None and self.pictures is not None:
            room, manager = self.pictures.room, self.pictures.of(pictures)
        counts = [self._num_new_tokens(tokens, wanted, usual_tokens, room) for tokens in prompts]
        return Answers(
            self.reading, name, prompts, wanted, counts, salt, keep_special, matcher, turn, manager
        )

    def _num_new_tokens(
        self, tokens: Sequence[int], wanted: Wanted, usual_tokens: int | None, most: int
    ) -> int:
        """Largest number of new tokens for a prompt, of ``most`` together with it."""
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
    """A place among the answers of a session, held from before its prompt is read until ``ask`` has begun it.

    Args:
        session: The session.

    Raises:
        Refused: no place is free, or the session is not alive.
    """

    def __init__(self, session: ServingSession) -> None:
        self._session, self._count = session, 0
        session.expect_alive()
        self.widen(1)

    def widen(self, count: int) -> None:
        """Take ``count`` places in all; raises Refused if too few are free, ArgumentError if too many."""
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
        """Release the places."""
        self._session.num_placed -= self._count


def _num_logits(model: Any) -> int:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(text_config_of(model).vocab_size if weight is None else weight.shape[0])


def _listed(counts: dict[str, int]) -> str:
    return "; ".join(f"{count}, {reason}" for reason, count in counts.items())


def _expect_device(device: torch.device) -> None:
    """Raise the device's error if it cannot compute any more."""
    torch.zeros(1, device=device).add_(1).item()


class _Router(OutputRouter):  # type: ignore[misc]
    """Router that passes outputs to their readers; each reads the latest one only, which has all tokens."""

    def __init__(self, session: ServingSession, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._session, self._loop = session, loop

    def deliver(self, output: Any) -> None:
        """Deliver one output; called in the session's thread."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Deliver outputs; called in the session's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give, outputs)

    def _give(self, outputs: list[Any]) -> None:
        for output in outputs:
            reader = self._session.readers.get(output.request_id)
            if reader is not None:
                reader.take(output)
            elif not output.is_finished():  # cancelled before the session had taken it
                self._session.manager.cancel_request(output.request_id)
