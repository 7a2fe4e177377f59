"""Prompts to tokens: in threads, none that cannot fit, and no small one waits for large ones."""

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
"""Bytes of a request up to which it takes milliseconds to read."""
_SMALL_THREADS: Final = 2

_NFC: Final = 4
"""NFC makes at most so many bytes one."""


class Prompts:
    """Makes tokens of what requests ask, outside the event loop.

    Large requests are read one after the other, in a thread of their own, so that they take neither the time
    nor the memory of small ones.

    Args:
        tokenizer: A fast one, which threads may share.
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
        """While a request is read; a large one waits for the one before it, as bytes alone.

        Args:
            num_bytes: Of the request.

        Yields:
            What computes ``call(*args)`` in a thread; who waits for it and is cancelled does not keep others
            waiting.
        """
        is_large = num_bytes > _SMALL
        threads = self._large if is_large else self._small
        async with self._turn if is_large else nullcontext():
            yield partial(asyncio.get_running_loop().run_in_executor, threads)

    def tokens_of(self, text: str, room: int, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Args:
            text: Of a prompt.
            room: Tokens of a prompt and its answer.
            add_special_tokens: As of the tokenizer.

        Raises:
            ArgumentError: there are so many that a new token has no room.
        """
        if self._bytes_per_token is not None:
            expect_room(room, -(-len(text.encode()) // self._bytes_per_token), "at least ")
        return self._encoded(text, room, add_special_tokens)

    def _encoded(self, text: str, room: int, add_special_tokens: bool) -> list[int]:
        if not self._is_plain:
            return list(self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        # What the tokenizer itself does, without offsets, masks and types, which hold up all threads.
        encoding = self._tokenizer.backend_tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0]
        expect_room(room, len(encoding))
        return list(encoding.ids)

    def close(self) -> None:
        """Read nothing any more."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


def _started(count: int, name: str) -> ThreadPoolExecutor:
    """Threads that have begun: where memory is short, none may begin when a request comes."""
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
    """Bytes of a text for which there is certainly a token; ``None`` where a token may stand for any number.

    Known are tokenizers of byte pairs that take nothing out of a text: byte-level ones, and those that write
    spaces as another letter and fall back to bytes.

    Args:
        tokenizer: A fast one.
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
    """The steps of a normalizer or a pre-tokenizer."""
    if step is not None:
        state = json.loads(step.__getstate__())
        yield from _flat(state, name)


def _flat(state: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
    for part in state.get(name, ()):
        yield from _flat(part, name)


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer takes nothing out of a text."""
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer makes no text shorter."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return bool(step["type"] == "Prepend")
