"""Tokenizing prompts in threads: those that cannot fit are refused, and small ones never wait for large."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from threading import Barrier
from typing import Any, Final

from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvloom.errors import ArgumentError

_SMALL: Final = 64 << 10
"""Largest number of bytes of a small request, which takes milliseconds to read."""
_SMALL_THREADS: Final = 2

_NFC: Final = 4
"""Largest factor by which NFC makes a text shorter, in bytes."""


class Prompts:
    """Tokenizer of prompts outside the event loop.

    Large requests are read one after the other, in their own thread, so that they do not delay small ones,
    and only one of them takes memory.

    Args:
        tokenizer: A fast tokenizer, which threads may share.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._small = _started(_SMALL_THREADS, "kvloom-small-prompts")
        self._large = _started(1, "kvloom-large-prompts")
        self._turn = asyncio.Lock()
        self._bytes_per_token = most_bytes_per_token(tokenizer)
        self._is_plain = all(
            getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None)
            for name in ("__call__", "_encode_plus", "_batch_encode_plus")
        )

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """Context for reading a request; a large one first waits for the one before it, as bytes.

        Args:
            num_bytes: Number of bytes of the request.

        Yields:
            Function that computes ``call(*args)`` in a thread. Cancelling the wait for it does not block
            other requests.
        """
        is_large = num_bytes > _SMALL
        threads = self._large if is_large else self._small
        async with self._turn if is_large else nullcontext():
            yield partial(asyncio.get_running_loop().run_in_executor, threads)

    def tokens_of(self, text: str, room: int, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Args:
            text: Text of a prompt.
            room: Largest number of tokens of a prompt and its answer.
            add_special_tokens: As in the tokenizer.

        Raises:
            ArgumentError: there are too many tokens for one more to fit.
        """
        if self._bytes_per_token is not None:
            expect_room(room, -(-len(text.encode()) // self._bytes_per_token), "at least ")
        return self._encoded(text, room, add_special_tokens)

    def _encoded(self, text: str, room: int, add_special_tokens: bool) -> list[int]:
        if not self._is_plain:
            return list(self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        # As in the tokenizer, but without offsets, masks and types, which block all threads.
        encoding = self._tokenizer.backend_tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0]
        expect_room(room, len(encoding))
        return list(encoding.ids)

    def close(self) -> None:
        """Stop the threads."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


def _started(count: int, name: str) -> ThreadPoolExecutor:
    """Pool whose threads have started, since a thread may not start later when memory is short."""
    threads, all_here = ThreadPoolExecutor(count, name), Barrier(count + 1)
    for _ in range(count):
        threads.submit(all_here.wait)
    all_here.wait()
    return threads


def expect_room(room: int, num_tokens: int, about: str = "") -> None:
    """Raise ArgumentError unless a prompt of ``num_tokens`` has room for a new token."""
    if num_tokens >= room:
        raise ArgumentError(f"the prompt must be at most {room - 1} tokens, got {about}{num_tokens}")


def most_bytes_per_token(tokenizer: Any) -> int | None:
    """Largest number of bytes of a text that one token covers; ``None`` if there is no known bound.

    Bounds are known for byte pair tokenizers that remove nothing from a text: byte-level ones, and those that
    replace spaces by another letter and fall back to bytes.

    Args:
        tokenizer: A fast tokenizer.
    """
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    names = backend.get_vocab(with_added_tokens=False)
    splits = [*_steps(backend.pre_tokenizer, "pretokenizers")]
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    if (
        not isinstance(backend.model, BPE)
        or not names
        or not (is_byte_level or backend.model.byte_fallback)
        or not all(map(_keeps_text, splits))
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    shrinks = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinks *= _NFC
        elif not _keeps_length(step):
            return None
    longest = max(len(name) if is_byte_level else len(name.encode()) for name in names)
    return max(longest, *(len(token.content.encode()) for token in added), 1) * shrinks


def _steps(step: Any, name: str) -> Iterator[dict[str, Any]]:
    """Steps of a normalizer or a pre-tokenizer."""
    if step is not None:
        state = json.loads(step.__getstate__())
        yield from _flat(state, name)


def _flat(state: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
    for part in state.get(name, ()):
        yield from _flat(part, name)


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer removes nothing from a text."""
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer makes no text shorter."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return bool(step["type"] == "Prepend")
