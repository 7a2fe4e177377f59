"""Damaged files are refused with this library's errors, and cost no more memory than they have bytes."""

from __future__ import annotations

import itertools
import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import campaign
import pytest
import torch
from carry import states as made
from carry.test_mlx_files import cache

from kvloom.carry import (
    CarriedCache,
    describe,
    llama_state,
    read_array_file,
    read_llama,
    read_mlx,
    write_array_file,
    write_mlx,
)
from kvloom.errors import KVError

pytestmark = pytest.mark.campaign
GOLDEN = Path(__file__).parent / "golden"
SLACK = 200_000  # bytes of Python's objects of a header and of an error


def load(carried: CarriedCache) -> None:
    for layer in carried.layers:
        layer.keys.load()
        layer.values.load()


def llama(form: str) -> bytes:
    state = made.plain()[0]
    if form == "state":
        return state
    tokens = struct.pack("<5i", *range(5))
    if form == "sequence":
        return struct.pack("<III", 0x67677371, 3, 5) + tokens + state[8:]
    return struct.pack("<III", 0x6767736E, 10, 5) + tokens + struct.pack("<I", 5) + b"llama" + state[8:]


def mlx(folder: Path, version: str, bits: int) -> bytes:
    path = folder / "a"
    write_mlx(cache(), path, version=version, bits=bits, rounding=bool(bits))
    return path.read_bytes()


def arrays(folder: Path) -> bytes:
    path = folder / "a"
    write_array_file(cache(), path, made.GEOMETRY)
    return path.read_bytes()


Read = Callable[[bytes], CarriedCache]


def whole_files(folder: Path) -> list[tuple[bytes, int, Read]]:
    """Files, how many of their bytes are headers that say sizes, and who reads them."""
    found: list[tuple[bytes, int, Read]] = []
    for form in ("state", "sequence", "context"):
        data = llama(form)
        found.append((data, len(data), lambda x: read_llama(x, made.GEOMETRY)))
    newer = llama_state(read_llama(llama("state"), made.GEOMETRY), made.GEOMETRY, version="0.6.0")
    for data in (newer, *(x.read_bytes() for x in sorted(GOLDEN.glob("*.slot")))):
        found.append((data, len(data), lambda x: read_llama(x, made.GEOMETRY)))
    for version, bits in itertools.product(("0.32.2", "0.28.4"), (0, 8)):
        data = mlx(folder, version, bits)
        found.append((data, 8 + struct.unpack_from("<Q", data)[0], lambda x: read_mlx(x, made.GEOMETRY)))
    data = arrays(folder)
    found.append((data, 8 + struct.unpack_from("<Q", data)[0], lambda x: read_array_file(x, made.GEOMETRY)))
    return found


def test_cut_and_longer_files_are_refused(tmp_path: Path) -> None:
    generator = random.Random(1)
    for data, _, read in whole_files(tmp_path):
        load(read(data))
        ends = {0, 1, 4, 8, 12, len(data) - 1} | {
            generator.randrange(len(data)) for _ in range(campaign.times(12))
        }
        for end in ends:
            with pytest.raises(KVError):
                read(data[:end])
        with pytest.raises(KVError):
            read(data + b"\0" * generator.randint(1, 40))


def places(data: bytes, header: int) -> list[int]:
    """Bytes that say sizes: those of a state's headers, and all of a header of JSON."""
    if header < len(data):
        return [*range(header)]
    sizes = [i for i in range(len(data)) if i < 200]
    rows = struct.pack("<iQ", 0, 512)
    at = data.find(rows)
    while at >= 0:
        sizes += range(at, at + 12)
        at = data.find(rows, at + 1)
    return sizes


def test_changed_headers_cost_no_memory_and_raise_our_errors(tmp_path: Path) -> None:
    """What is still accepted has the same sizes: another type or position of the same width, or a name."""
    generator = random.Random(2)
    for data, header, read in whole_files(tmp_path):
        where = places(data, header)
        for _ in range(campaign.times(60)):
            wrong = bytearray(data)
            for _ in range(generator.choice((1, 1, 2, 8))):
                at = generator.choice(where)
                wrong[at : at + 1] = generator.choice((b"\0", b"\xff", b"\x7f", b"9", generator.randbytes(1)))
            tracemalloc.start()
            try:
                load(read(bytes(wrong)))
            except KVError:
                pass
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= 2 * len(data) + SLACK


def test_tensors_of_damaged_headers_are_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allocates for no header what the file has no bytes for."""
    generator, data = random.Random(3), llama("sequence")
    largest = 0
    original = torch.Tensor.clone

    def clone(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, x.numel() * x.element_size())
        return original(x, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    for _ in range(campaign.times(100)):
        wrong = bytearray(data)
        at = generator.choice(range(0, 200, 4))
        wrong[at : at + 4] = generator.choice((2**31 - 1, 2**32 - 1, 2**16, 7)).to_bytes(4, "little")
        try:
            load(read_llama(bytes(wrong), made.GEOMETRY))
        except KVError:
            pass
    assert 0 < largest <= len(data)


def test_descriptions_of_damaged_files_raise_our_errors(tmp_path: Path) -> None:
    generator = random.Random(4)
    for data, _, _ in whole_files(tmp_path):
        assert describe(data)
        for _ in range(campaign.times(10)):
            wrong = bytearray(data)
            wrong[generator.randrange(min(len(data), 400))] = generator.randrange(256)
            try:
                assert describe(bytes(wrong[: generator.choice((len(data), len(data) // 2))]))
            except KVError:
                pass


def test_deep_and_long_headers_are_refused() -> None:
    for text in (
        b'{"a":' * 50_000,
        b"[" * 200_000,
        json.dumps({"__metadata__": {"2.0": ""}}).encode(),
        b"9" * 5000,
    ):
        with pytest.raises(KVError):
            read_mlx(struct.pack("<Q", len(text)) + text)
