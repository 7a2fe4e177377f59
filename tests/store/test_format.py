"""Files of runs: what is written is read, and whatever else is refused within memory bounded by the file."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
from campaign import times
from safetensors import deserialize
from store.runs import CODES, PLAIN, damaged, fingerprint, make_run, rewritten

from kvloom.store.digests import TextDigests, salt_digest
from kvloom.store.fingerprint import LayerFormat
from kvloom.store.format import DamagedRun, OtherFormat, Run, ranges_of, read_head
from kvloom.store.sums import checksum

TOKENS = list(range(10, 18))
NUM_CHANGED = times(20_000)


def file_of(run: Run, data: bytes | bytearray) -> bytes:
    return run.head() + bytes(data)


def accept(file: bytes, tokens: list[int], salt: str = "") -> Run:
    """As a reader does that wants all pages."""
    run, start = read_head(file, len(file))
    if run.fingerprint != fingerprint() or run.salt != salt_digest(salt):
        raise DamagedRun("another model or salt")
    prefixes = TextDigests(fingerprint().digest, salt_digest(salt), tokens)
    run.expect_prefix(prefixes, run.end)
    run.expect_whole(memoryview(file)[start:], range(run.num_pages), range(run.fingerprint.num_heads))
    return run


@pytest.mark.parametrize("has_text", [True, False])
@pytest.mark.parametrize("first", [0, 4])
def test_what_is_written_is_read(first: int, has_text: bool) -> None:
    run, data = make_run(TOKENS, first, has_text=has_text)
    file = file_of(run, data)
    assert accept(file, TOKENS) == run
    assert read_head(file, len(file))[1] == len(file) - len(data)


def test_other_readers_of_safetensors_read_it() -> None:
    run, data = make_run(TOKENS, 2)
    tensors = dict(deserialize(file_of(run, data)))
    assert list(tensors) == ["tokens", "digests", "checksums", "seal", "pages"] or len(tensors) == 5
    assert tensors["tokens"]["shape"] == [3, 2]
    assert struct.unpack("<6q", tensors["tokens"]["data"]) == tuple(TOKENS[2:])
    assert tensors["pages"]["shape"] == [2, 3, run.page_bytes]
    assert bytes(tensors["pages"]["data"]) == data


def test_the_head_ends_where_vectors_may_begin() -> None:
    for first in range(0, 8, 2):
        run, _ = make_run(TOKENS, first)
        assert len(run.head()) % 8 == run.page_bytes % 8 == 0


def test_layers_that_differ_in_heads_have_one_range() -> None:
    one = fingerprint(LayerFormat(2, CODES, PLAIN), 1)
    two = rewritten_layers(one, LayerFormat(3, PLAIN, CODES))
    assert (one.num_heads, two.num_heads) == (2, 1)
    run, data = make_run(TOKENS, whose=two)
    again, start = read_head(file_of(run, data), len(run.head()) + len(data))
    assert (again, start) == (run, len(run.head()))


def rewritten_layers(whose, layer):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(whose, layers=(*whose.layers, layer))


def test_every_truncation_is_refused() -> None:
    file = file_of(*make_run(TOKENS))
    for end in range(len(file)):
        with pytest.raises(DamagedRun):
            accept(file[:end], TOKENS)
    with pytest.raises(DamagedRun, match="must have"):
        accept(file + b"\0", TOKENS)


def test_every_changed_byte_is_refused() -> None:
    file = bytearray(file_of(*make_run(TOKENS[:4])))
    for at in range(len(file)):
        for changed in {file[at] ^ 1, file[at] ^ 0x80, 0, 255, 0x20} - {file[at]}:
            old, file[at] = file[at], changed
            with pytest.raises(DamagedRun):
                accept(bytes(file), TOKENS[:4])
            file[at] = old


@pytest.mark.campaign
def test_random_damage_is_refused() -> None:
    rng = random.Random(0)
    good = file_of(*make_run(TOKENS[:4]))
    for _ in range(NUM_CHANGED):
        with pytest.raises(DamagedRun):
            accept(damaged(good, rng), TOKENS[:4])


def changed_fields() -> Iterator[tuple[str, Run]]:
    """Runs of other pages under a seal and checksums that are right."""
    run, _ = make_run(TOKENS)
    yield "first", rewritten(run, first=2)
    yield "before", rewritten(run, before=bytes(32))
    yield "salt", rewritten(run, salt=salt_digest("b"))
    yield "a digest", rewritten(run, digests=(bytes(32), *run.digests[1:]))
    yield "the order of pages", rewritten(run, digests=run.digests[::-1])
    yield "a token", rewritten(run, tokens=bytes(8) + (run.tokens or b"")[8:])
    yield "a checksum", rewritten(run, checksums=bytes(16) + run.checksums[16:])
    yield "the weights", rewritten(run, fingerprint=fingerprint(weights="x"))


@pytest.mark.parametrize(
    ("name", "run"), list(changed_fields()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_changed_field_under_a_right_seal_is_refused(name: str, run: Run) -> None:
    _, data = make_run(TOKENS)
    with pytest.raises(DamagedRun):
        accept(file_of(run, data), TOKENS)


def test_another_text_is_refused() -> None:
    file = file_of(*make_run(TOKENS))
    for at in range(len(TOKENS)):
        other = [*TOKENS[:at], 99, *TOKENS[at + 1 :]]
        with pytest.raises(DamagedRun, match="of another text"):
            accept(file, other)
    with pytest.raises(DamagedRun):
        accept(file, TOKENS, "salt")


HOSTILE = {
    "no header": b"",
    "a long header": struct.pack("<Q", 1 << 60),
    "a header past the end": struct.pack("<Q", 1 << 20) + b"{}",
    "no JSON": b"{",
    "another value": b"[]",
    "a number": b"1" * 5000,
    "deep lists": b"[" * 100_000,
    "a surrogate": b'{"__metadata__":{"format":"\\ud800"}}',
    "bad UTF-8": b'{"\xff":1}',
    "no constant": b'{"__metadata__":NaN}',
    "twice": b'{"__metadata__":{},"__metadata__":{}}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str) -> None:
    text = HOSTILE[name]
    is_framed = not text.startswith(b"\0") and name not in (
        "no header",
        "a long header",
        "a header past the end",
    )
    with pytest.raises(DamagedRun):
        accept(struct.pack("<Q", len(text)) + text if is_framed else text, TOKENS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first", "-2"),
        ("first", "9" * 5000),
        ("page_size", "0"),
        ("page_size", "1_0"),
        ("num_pages", str(1 << 62)),
        ("num_pages", "\N{ARABIC-INDIC DIGIT FOUR}"),
        ("salt", "zz"),
        ("before", "00"),
        ("text", "pickle"),
        ("fingerprint", "{}"),
        ("fingerprint", '{"layers":[[1000000000000,{}]]}'),
        ("fingerprint", '{"layers":[[1000000000000,{}],[-1000000000000,{}]]}'),
        ("format", "kvloom-run/2"),
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused(field: str, value: str) -> None:
    run, data = make_run(TOKENS)
    head = run.head()
    (size,) = struct.unpack_from("<Q", head)
    header = json.loads(head[8 : 8 + size])
    header["__metadata__"][field] = value
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sealed = struct.pack("<Q", len(text)) + text + head[8 + size : -16]
    expected = OtherFormat if field == "format" else DamagedRun
    with pytest.raises(expected):
        accept(sealed + checksum(sealed) + bytes(data), TOKENS)


def test_a_damaged_file_takes_no_more_memory_than_its_size() -> None:
    rng = random.Random(1)
    good = file_of(*make_run(list(range(2000))))
    for _ in range(200):
        file = bytearray(good)
        at = rng.randrange(2000)
        file[at : at + 4] = rng.randbytes(4)
        tracemalloc.start()
        with pytest.raises(DamagedRun):
            accept(bytes(file), list(range(2000)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 2 * len(file) + (1 << 20)


def test_a_part_of_the_pages_and_heads_is_read_by_its_ranges() -> None:
    run, data = make_run(TOKENS)
    size = run.page_bytes
    for pages in (range(4), range(1, 3)):
        for heads in (range(2), range(1, 2)):
            ranges = ranges_of(pages, heads, 4, size, 0)
            part = b"".join(data[a:b] for a, b in ranges)
            assert len(part) == len(pages) * len(heads) * size
            run.expect_whole(memoryview(part), pages, heads)
            damaged = bytearray(part)
            damaged[-1] ^= 1
            with pytest.raises(DamagedRun, match=f"page {pages[-1]} of head 1 "):
                run.expect_whole(memoryview(damaged), pages, heads)
