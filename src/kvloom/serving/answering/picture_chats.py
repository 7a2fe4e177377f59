"""Chats with pictures beside a session: their answers are computed one at a time, in a thread.

Sessions of transformers take only tokens. These answers come from ``generate`` with a pool, on a copy of the
session's model. The copy shares the weights, and has another attention than the session's.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from transformers import DynamicCache

from kvloom.integrations.transformers import KVPool, enable, summary_of
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.session.choices.sampling import Choice
from kvloom.serving.answering.answers import Answers
from kvloom.serving.answering.picture_answers import (
    PAGE_SIZE,
    Job,
    PictureOutput,
    answer_by_generate,
    expect_same_logits,
    twin_of,
)
from kvloom.serving.answering.vision import PicturePrompt, Vision
from kvloom.serving.protocol.messages import Chat

_LOG: Final = logging.getLogger("kvloom")

_TRIED_WORDS: Final = "one two three"
"""Words before and after the pictures with which a model is tried."""


class PictureChats:
    """Queue of answers to chats with pictures, computed in the order of their requests.

    Args:
        model: Model of the session, before the session begins.
        tokenizer: Tokenizer of the model.
        processor: Processor of the model.
        num_tokens: Largest number of tokens in the pool.
        kv: As in ``KVPool.for_model``.
        policy: The same.
        options: Other arguments of both ``KVPool.for_model`` and ``enable``.

    Raises:
        Exception: any error of a model without vision, or whose prefixes with pictures cannot be found.
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
        """Largest number of tokens of a prompt and its answer."""
        self._model = twin_of(model)
        options["page_size"] = PAGE_SIZE
        enable(self._model, kv, **options)
        self._try(tokenizer)
        self.pool = KVPool.for_model(self._model, kv, max_tokens=num_tokens, policy=policy, **options)
        cache = self.pool.begin(torch.zeros(1, 1, dtype=torch.int64), content="none")
        with torch.no_grad():  # allocates the pages now, before the session takes the free memory
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

    def start(self, readers: Mapping[str, Answers]) -> None:
        """Start in the event loop of ``readers``, which read answers by their ids."""
        self._readers, self._loop = readers, asyncio.get_running_loop()

    def close(self) -> None:
        """Cancel all answers; returns when the thread has ended."""
        for request_id in [*self._jobs]:
            self.cancel(request_id)
        self._thread.shutdown()
        self.pool.close()

    @property
    def num_taken(self) -> int:
        """Number of answers that are computed or wait."""
        return len(self._jobs)

    def of(self, prompt: PicturePrompt) -> "PictureManager":
        """Replacement of a session's manager, for answers to one prompt."""
        return PictureManager(self, prompt)

    def add(self, job: Job) -> None:
        """Add an answer, which is computed after those before it."""
        self._jobs[job.request_id] = job
        self._thread.submit(self._compute, job)

    def cancel(self, request_id: str) -> None:
        """Stop an answer after the token that is being computed."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.is_cancelled = True

    def _compute(self, job: Job) -> None:
        try:
            if not job.is_cancelled:
                answer_by_generate(self._model, self.pool, job, self._tell)
        except Exception as error:  # fails this chat alone
            _LOG.warning("an answer to a chat with pictures failed: %s", summary_of(error))
            self._tell(PictureOutput(job.request_id, [*job.tokens], summary_of(error), is_last=True))
        finally:
            del self._jobs[job.request_id]

    def _tell(self, output: PictureOutput) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give, output)

    def _give(self, output: PictureOutput) -> None:
        reader = self._readers.get(output.request_id)
        if reader is not None:
            reader.take(output)


def picture_chats(*args: Any, **options: Any) -> PictureChats | None:
    """A ``PictureChats`` with these arguments; ``None``, with a warning, if the model does not support it."""
    try:
        return PictureChats(*args, **options)
    except Exception as error:  # whatever a folder's processor, template and model raise
        _LOG.warning("the model answers chats of text alone, without pictures: %s", summary_of(error))
        return None


class PictureManager:
    """Replacement of a session's manager, which takes requests for answers to one prompt.

    Args:
        chats: Queue that computes the answers.
        prompt: Prompt with pictures.
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
        """Request one answer; ``tokens`` and ``streaming`` are ignored: each token of it is delivered."""
        ends = frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
        self._chats.add(Job(request_id, self._prompt, cache_salt, max_new_tokens, ends, choice))
        return request_id

    def cancel_request(self, request_id: str) -> None:
        """Cancel an answer, as ``PictureChats.cancel``."""
        self._chats.cancel(request_id)
