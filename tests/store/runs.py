"""Runs of pages as the tests write them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvloom.store.digests import TextDigests, salt_digest, token_bytes
from kvloom.store.fingerprint import Fingerprint, LayerFormat, SideFormat
from kvloom.store.format import Run

PLAIN = SideFormat(4, "float32")
CODES = SideFormat(4, "float32", 8, 2, "float16")


def fingerprint(layer: LayerFormat | None = None, num_layers: int = 2, **changes: str) -> Fingerprint:
    """One with small layers."""
    fields = {
        "config": "c" * 8,
        "weights": "w" * 8,
        "dtype": "float32",
        "rope": "{}",
        "attention": "full",
        "rotation": "none",
    }
    return Fingerprint(**(fields | changes), layers=(layer or LayerFormat(2, CODES, PLAIN),) * num_layers)


def make_run(
    tokens: Sequence[int],
    first: int = 0,
    page_size: int = 2,
    salt: str = "",
    whose: Fingerprint | None = None,
    has_text: bool = True,
) -> tuple[Run, bytearray]:
    """The pages of ``tokens[first:]``, with random bytes."""
    whose = fingerprint() if whose is None else whose
    digest = salt_digest(salt)
    ends = range(first, len(tokens) + 1, page_size)
    before, *digests = TextDigests(whose.digest, digest, tokens).digests(ends)
    text = token_bytes(tokens[first : ends[-1]]) if has_text else None
    run = Run(whose, digest, first, page_size, before, tuple(digests), text)
    data = bytearray(random.Random(str(tokens)).randbytes(run.data_bytes))
    return run.with_checksums(memoryview(data)), data


def rewritten(run: Run, **changes: object) -> Run:
    """The run with other fields, under checksums that are right."""
    return replace(run, **changes)  # type: ignore[arg-type]


def with_tests() -> dict[str, str]:
    """An environment for children that import the tests, and the sources that their parent does."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def damaged(good: bytes, rng: random.Random) -> bytes:
    """Bytes changed, removed, put in, moved or cut off, several at once."""
    file = bytearray(good)
    while file == good:
        for _ in range(rng.randint(1, 3)):
            at, size = rng.randrange(len(file) or 1), rng.randint(1, 12)
            match rng.randrange(5):
                case 0:
                    file[at : at + size] = rng.randbytes(size)
                case 1:
                    del file[at : at + size]
                case 2:
                    file[at:at] = rng.randbytes(size)
                case 3:
                    file[at:at] = file[: size * 4]
                case _:
                    del file[at:]
    return bytes(file)
