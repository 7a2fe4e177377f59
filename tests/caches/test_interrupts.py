"""Ctrl-C while pages change hands: nobody holds a page for ever, and nothing wrong is found."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from oracles.interrupts import interrupted
from torch import Tensor

from kvloom.caches import CacheFormat, PrefixCache, PrefixSequence
from kvloom.paging import interruptible, uninterrupted

FIRST, OTHER = list(range(1, 31)), list(range(200, 237))
SECOND = FIRST[:17] + list(range(100, 120))
STRIDE = 41


def keys(tokens: list[int]) -> Tensor:
    return torch.tensor(tokens).div(100).view(-1, 1, 1).expand(-1, 2, 8)


def feed(cache: PrefixCache, tokens: list[int]) -> PrefixSequence:
    sequence = cache.begin(tokens)
    new = keys(tokens[sequence.num_cached :])
    for layer in range(2):
        cache.append(sequence, layer, new, new)
    cache.commit(sequence)
    return sequence


def start(windows: list[int | None]) -> PrefixCache:
    """Full of two texts, so that more of others evicts them."""
    format = CacheFormat(page_size=4, max_tokens=64)
    cache = PrefixCache(format, num_layers=2, heads=2, head_dim=8, dtype=torch.float32, windows=windows)
    for tokens in (FIRST, OTHER):
        cache.end(feed(cache, tokens))
    return cache


def use(cache: PrefixCache) -> None:
    with cache:
        one = feed(cache, SECOND)
        two = cache.fork(one)
        cache.extend(two, [7, 8, 9])
        for layer in range(2):
            cache.append(two, layer, keys([7, 8, 9]), keys([7, 8, 9]))
        cache.commit(two)
        cache.truncate(two, 38)
        cache.end(one)


@pytest.mark.parametrize("windows", [[None, None], [None, 6]], ids=str)
def test_ctrl_c_anywhere_leaves_all_pages_free_or_found(windows: list[int | None]) -> None:
    count = interrupted(0, lambda: use(start(windows)))
    for at in range(1, count, STRIDE):
        cache = start(windows)
        interrupted(at, lambda cache=cache: use(cache))
        cache.__exit__(None, None, None)  # which Ctrl-C may have met before it began
        cache.check()
        assert cache.report()["active"] == 0, at
        for tokens in (FIRST, SECOND, OTHER):
            sequence = feed(cache, tokens)
            query = torch.randn(1, 2, 8)
            scores = (query[0] / 8**0.5 * keys(tokens)).sum(2).softmax(0)
            expected = (scores.unsqueeze(2) * keys(tokens)).sum(0)
            torch.testing.assert_close(cache.attend(query, [sequence], 0)[0], expected)
            cache.end(sequence)
        cache.check()


def test_ctrl_c_waits_for_the_end_and_comes_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            done.append("all")
        done.append("more")
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_comes_at_once_where_it_may() -> None:
    done = []
    with uninterrupted():
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(signal.SIGINT)
            done.append("within")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            with interruptible():
                done.append("after")
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_a_program_are_called_and_stay() -> None:
    seen: list[int] = []

    def handler(number: int, _: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_part_in_it() -> None:
    handlers = []

    def run() -> None:
        with uninterrupted(), interruptible():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
