"""Chats with pictures beside a session: their answers are computed one at a time, in a thread.

Sessions of transformers take tokens alone. These answers come from ``generate`` with a pool, on a copy of the
session's model that shares its weights, as the configuration of the model itself has the session's attention.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache

from kvloom.integrations.transformers import KVPool, enable, summary_of
from kvloom.integrations.transformers.batching.sampling import Choice
from kvloom.integrations.transformers.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.text_config import text_config_of
from kvloom.serving.messages import Chat
from kvloom.serving.picture_answers import PAGE_SIZE, Job, Output, answer, expect_same_logits, twin_of
from kvloom.serving.vision import PicturePrompt, Vision

if TYPE_CHECKING:
    from kvloom.serving.answers import Answers

_LOG: Final = logging.getLogger("kvloom")

_TRIED_WORDS: Final = "one two three"
"""Before and behind the pictures with which a model is tried."""


class PictureChats:
    """Computes answers to chats with pictures, in the order in which they were asked.

    Args:
        model: Of the session that answers chats without pictures, before it began.
        tokenizer: The model's.
        processor: The same.
        num_tokens: That are kept at a time.
        kv: As of ``KVPool.for_model``.
        policy: The same.
        options: Others that ``enable`` has, too.

    Raises:
        Exception: what a model raises that does not see, or whose prefixes with pictures cannot be found.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        processor: Any,
        num_tokens: int,
        kv: str = "auto",
        policy: str = "lru",
        **options: Any,
    ) -> None:
        self.vision = Vision(model, processor, tokenizer)
        longest = getattr(text_config_of(model), "max_position_embeddings", None)
        self.room = min(num_tokens, longest or num_tokens)
        """Tokens of a prompt and its answer, at most."""
        self._model = twin_of(model)
        options["page_size"] = PAGE_SIZE
        enable(self._model, kv, **options)
        self._try(tokenizer)
        self.pool = KVPool.for_model(self._model, kv, max_tokens=num_tokens, policy=policy, **options)
        cache = self.pool.begin(torch.zeros(1, 1, dtype=torch.int64), content="none")
        with torch.no_grad():  # pages are taken now, so that the session's leave room for them
            self._model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), **{CACHE_ARGUMENT: cache})
        self._readers: Mapping[str, Answers] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ThreadPoolExecutor(1, "kvloom-pictures")
        self._jobs: dict[str, Job] = {}

    def _try(self, tokenizer: Any) -> None:
        from PIL import Image

        words = {"type": "text", "text": _TRIED_WORDS}
        chat = Chat([{"role": "user", "content": [words, {"type": "image"}, words]}], None, {})
        text, prompts = chat.text(tokenizer), []
        for turned in (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180):
            image = Image.linear_gradient("L").transpose(turned).convert("RGB")
            prompts.append(self.vision.prompt_of(text, chat.messages, [image]))
        expect_same_logits(self._model, prompts, DynamicCache(config=text_config_of(self._model)))

    def start(self, readers: Mapping[str, "Answers"]) -> None:
        """Begin, in the event loop in which answers are read, by those who have their names."""
        self._readers, self._loop = readers, asyncio.get_running_loop()

    def close(self) -> None:
        """Compute nothing any more; returns when the thread has ended."""
        for request_id in [*self._jobs]:
            self.cancel(request_id)
        self._thread.shutdown()
        self.pool.close()

    @property
    def num_taken(self) -> int:
        """Answers that are computed or wait."""
        return len(self._jobs)

    def of(self, prompt: PicturePrompt) -> "Asked":
        """What takes requests for answers to a prompt, in the place of a session's manager."""
        return Asked(self, prompt)

    def add(self, job: Job) -> None:
        """Compute an answer when those before it have ended."""
        self._jobs[job.request_id] = job
        self._thread.submit(self._compute, job)

    def cancel(self, request_id: str) -> None:
        """Compute no token of an answer behind the one that is being computed."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.is_cancelled = True

    def _compute(self, job: Job) -> None:
        try:
            if not job.is_cancelled:
                answer(self._model, self.pool, job, self._tell)
        except Exception as error:  # of this chat alone
            _LOG.warning("an answer to a chat with pictures failed: %s", summary_of(error))
            self._tell(Output(job.request_id, [*job.tokens], summary_of(error), is_last=True))
        finally:
            del self._jobs[job.request_id]

    def _tell(self, output: Output) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give, output)

    def _give(self, output: Output) -> None:
        reader = self._readers.get(output.request_id)
        if reader is not None:
            reader.take(output)


def picture_chats(*args: Any, **options: Any) -> PictureChats | None:
    """A ``PictureChats`` with these arguments; ``None`` where there can be none, which a warning says."""
    try:
        return PictureChats(*args, **options)
    except Exception as error:  # whatever a folder's processor, template and model raise
        _LOG.warning("the model answers chats of text alone, without pictures: %s", summary_of(error))
        return None


class Asked:
    """Takes requests for answers to one prompt, as a manager of a session does.

    Args:
        chats: That compute them.
        prompt: With pictures.
    """

    def __init__(self, chats: PictureChats, prompt: PicturePrompt) -> None:
        self._chats, self._prompt = chats, prompt

    def add_request(
        self,
        tokens: Any,
        *,
        request_id: str,
        max_new_tokens: int,
        streaming: bool,
        eos_token_id: int | Iterable[int],
        cache_salt: str,
        choice: Choice,
        agent_turn: None = None,
    ) -> str:
        """Ask for one answer; tokens are those of the prompt, and each is told."""
        ends = frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
        self._chats.add(Job(request_id, self._prompt, cache_salt, max_new_tokens, ends, choice))
        return request_id

    def cancel_request(self, request_id: str) -> None:
        """As of ``PictureChats.cancel``."""
        self._chats.cancel(request_id)
