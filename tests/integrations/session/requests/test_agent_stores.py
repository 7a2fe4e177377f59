"""Sessions of agents in stores: what another process computed is restored, the last page in part as well."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from integrations.models.test_families import family
from integrations.session.requests.test_agent_sessions import ask, outcome, sessions, store_in
from integrations.session.requests.test_stores import KINDS, NEW, stem
from oracles.pairs import in_turn

from kvloom.integrations.transformers.session.requests.prompt import AgentTurn
from kvloom.integrations.transformers.session.requests.store_reads import Read
from kvloom.store.tiers.tier import ReadPages


@pytest.mark.parametrize(("name", "page_size"), in_turn(list(KINDS), [16, 32]))
def test_a_store_has_the_last_page_in_part(name: str, page_size: int, tmp_path: Path) -> None:
    """So that a server that begins anew restores all of a session, in layers of every kind."""
    model, prompt, tail = family(name), stem(60), stem(21, 2)
    options: dict[str, Any] = {"page_size": page_size, "max_batch_tokens": 64}
    with sessions(model, KINDS[name], store_in(tmp_path), **options) as running:
        answer, _ = ask(running, prompt)
    for asked in (prompt + answer + tail, prompt + answer):
        with sessions(model, KINDS[name], **options) as running:
            expected, _ = ask(running, asked, None)
        with sessions(model, KINDS[name], store_in(tmp_path), **options) as running:
            given, turn = ask(running, asked)
            assert given == expected
            assert outcome(turn) == (67, 67, "")
            running.cache.requests.check()
            assert ask(running, asked + given)[1].num_restored == len(asked) + NEW - 1


def test_the_last_page_of_a_store_is_of_all_tokens_before_it(tmp_path: Path) -> None:
    model, prompt = family("Llama"), stem(60)
    with sessions(model, store=store_in(tmp_path)) as running:
        answer, _ = ask(running, prompt, cache_salt="mine")
    text = prompt + answer
    cases = [
        ("mine", [*text[:66], 2, 2, 2], 66),  # another token in the last page
        ("mine", [*text[:30], 2, *text[31:], 2], 16),  # another one before it
        ("yours", [*text, 2], 0),
        ("mine", [*text, 2], 67),
    ]
    for salt, asked, found in cases:
        with sessions(model, store=store_in(tmp_path)) as running:
            _, turn = ask(running, asked, cache_salt=salt)
            assert running.manager.report().tokens_found == found
            assert outcome(turn) == (
                (67, 67, "") if found == 67 else (0, 0, "no session of this id is known")
            )


def test_two_requests_with_the_same_pages_and_another_end(tmp_path: Path) -> None:
    """At once, where what is read for one is not read for the other."""
    model, prompt = family("Llama"), stem(60)
    with sessions(model, store=store_in(tmp_path)) as running:
        answer, _ = ask(running, prompt)
    texts = [prompt + answer, [*prompt, *answer[:5], 2, 2, 2]]
    expected = []
    for text in texts:
        with sessions(model) as running:
            expected.append(ask(running, text, None)[0])
    with sessions(model, store=store_in(tmp_path)) as running:
        ask(running, [*texts[0][:64], 2], None)  # the full pages, for which one would wait for the other
        turns = [AgentTurn("", "a"), AgentTurn("", "b")]
        names = [
            running.manager.add_request(text, agent_turn=turn)
            for text, turn in zip(texts, turns, strict=True)
        ]
        running.run()
        assert [running.outputs[name].generated_tokens for name in names] == expected
        assert [outcome(turn)[:2] for turn in turns] == [(67, 67), (0, 0)]
        assert running.manager.report().tokens_found == 64 + 67 + 65


def test_only_requests_of_sessions_read_pages_in_part(tmp_path: Path) -> None:
    model, prompt = family("Llama"), stem(60)
    with sessions(model, store=store_in(tmp_path)) as running:
        answer, _ = ask(running, prompt)
    with sessions(model, store=store_in(tmp_path)) as running:
        ask(running, [*prompt, *answer, 2], None)
        assert running.manager.report().tokens_found == 64


def test_a_page_in_part_has_all_of_its_tokens(tmp_path: Path) -> None:
    """What was read of one group of layers may begin behind what is known of all."""
    model, prompt = family("Gemma3"), stem(60)
    with sessions(model, store=store_in(tmp_path)) as running:
        answer, _ = ask(running, prompt)
    text = (prompt + answer)[:-1]
    with sessions(model, store=store_in(tmp_path)) as running:
        reads = running.cache.requests.prefixes.reads
        taken = []
        for starts in ((0, 32), (48, 48), (0, 64)):
            for below, start in zip(reads._below, starts, strict=True):
                pieces = Future[list[ReadPages]]()
                pieces.set_result(below.store.load(below.fingerprint, "", text, start))
                below.now = Read(("", start, text), pieces)
                assert pieces.result()
            part = reads.take_part(48, 60)
            taken.append((part.end, len(part.refs), part.is_end))
            for group, ref in zip(running.cache.requests.groups, part.refs, strict=False):
                group.pages.pool.release(ref)
        assert taken == [(60, 2, False), (60, 2, False), (48, 0, False)]
