"""Files of every release are read bit for bit, for ever. A golden file is never written again."""

from __future__ import annotations

from pathlib import Path

import pytest
from store.runs import CODES, PLAIN, fingerprint, make_run

from kvloom.store.digests import TextDigests, salt_digest
from kvloom.store.fingerprint import LayerFormat
from kvloom.store.format import read_head

GOLDEN = Path(__file__).parent / "golden"
TOKENS = [1, 5, 70_000, 2, 9, 9, 0, 12]
WHOSE = fingerprint(LayerFormat(2, CODES, PLAIN), 3, rope='{"rope_theta":10000.0}')
MADE = {
    "kvloom-run-1-tokens": {"whose": WHOSE},
    "kvloom-run-1-digests": {"whose": WHOSE, "first": 4, "salt": "tenant", "has_text": False},
}


@pytest.mark.parametrize("name", MADE)
def test_a_golden_file_is_read_and_written_bit_for_bit(name: str) -> None:
    file = (GOLDEN / f"{name}.safetensors").read_bytes()
    expected, data = make_run(TOKENS, **MADE[name])  # type: ignore[arg-type]
    run, start = read_head(file, len(file))
    assert run == expected
    assert file[start:] == data
    assert run.head() + data == file
    run.expect_whole(memoryview(file)[start:], range(run.num_pages), range(2))
    prefixes = TextDigests(WHOSE.digest, salt_digest(str(MADE[name].get("salt", ""))), TOKENS)
    run.expect_prefix(prefixes, run.end)


def test_names_stay() -> None:
    names = [make_run(TOKENS, **options)[0].name for options in MADE.values()]  # type: ignore[arg-type]
    assert names == NAMES


NAMES = [
    "3cd37f47d63039db/ed229a11faf5234f1b5ff014652d03719eab881d-0-2.safetensors",
    "3cd37f47d63039db/a246f592ffa8b57841479d20a573085039c01c0e-4-2.safetensors",
]
