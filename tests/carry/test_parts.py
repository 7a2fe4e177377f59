"""Files are the same whatever the parts in which they are written."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvloom.carry import (
    CacheGeometry,
    CarriedCache,
    CarriedLayer,
    CarriedSide,
    read_array_file,
    read_llama,
    read_mlx,
    write_array_file,
    write_llama,
    write_mlx,
)
from kvloom.carry.files.writing import FileBehind

SIZES = CacheGeometry.uniform(2, 2, 64, "llama")


def cache_of(num_tokens: int) -> CarriedCache:
    torch.manual_seed(0)
    sides = [CarriedSide.of(torch.randn(num_tokens, 2, 64).half()) for _ in range(4)]
    layers = (CarriedLayer(sides[0], sides[1]), CarriedLayer(sides[2], sides[3]))
    return CarriedCache(layers, num_tokens, tuple(range(num_tokens)))


def test_files_do_not_depend_on_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of 23 tokens, the last one shorter, give the bytes of one part, from and to each format."""
    files = dict[int, list[bytes]]()
    for elements in (1 << 19, 10 * 128):
        monkeypatch.setattr("kvloom.carry.carried._PART", elements)
        paths = [tmp_path / f"{elements}.{i}" for i in range(8)]
        write_llama(cache_of(23), paths[0], SIZES)
        write_mlx(read_llama(paths[0], SIZES), paths[1], pairs="adjacent")
        write_array_file(read_mlx(paths[1], SIZES, pairs="adjacent"), paths[2], SIZES)
        write_llama(read_array_file(paths[2], SIZES), paths[3], SIZES, flash_attention=False)
        back = read_llama(paths[3], SIZES)
        write_llama(back, paths[4], SIZES)
        write_llama(back, paths[5], SIZES, kind="q8_0", rotated=True, rounding=True)
        write_mlx(read_llama(paths[5], SIZES, rotated=True), paths[6], kind="float16", rounding=True)
        write_llama(read_llama(paths[5], SIZES, rotated=True), paths[7], SIZES, rotated=True)
        files[elements] = [path.read_bytes() for path in paths]
        assert files[elements][4] == files[elements][0]
        assert files[elements][7] == files[elements][5]
    assert files[1 << 19] == files[10 * 128]


def test_a_file_that_cannot_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes finds the disk full at its third write: the caller hears it, no file is left."""
    written, threads = os.pwrite, threading.active_count()
    calls = iter(range(99))

    def full(number: int, data: memoryview, at: int) -> int:
        if next(calls) >= 2:
            raise OSError(errno.ENOSPC, "no space")
        return written(number, data, at)

    monkeypatch.setattr("kvloom.carry.files.writing.os.pwrite", full)
    with pytest.raises(OSError, match="no space"):
        write_mlx(cache_of(23), tmp_path / "out")
    assert not [*tmp_path.iterdir()]
    assert threading.active_count() == threads


def test_bytes_that_are_written_in_pieces_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a system does that takes fewer bytes than it was given."""
    write_mlx(cache_of(23), tmp_path / "whole")
    written = os.pwrite
    monkeypatch.setattr(
        "kvloom.carry.files.writing.os.pwrite", lambda number, data, at: written(number, data[:1000], at)
    )
    write_mlx(cache_of(23), tmp_path / "pieces")
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_memory_is_used_again_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that falls behind writes what it was given, though all parts but the last have one size."""
    monkeypatch.setattr("kvloom.carry.carried._PART", 128)
    write_mlx(cache_of(23), tmp_path / "quick", pairs="adjacent")
    written, kept = os.pwrite, set[int]()

    def late(number: int, data: memoryview, at: int) -> int:
        time.sleep(0.001)
        return written(number, data, at)

    def kept_room(self: FileBehind, *size: Any) -> Tensor:
        made = room(self, *size)
        kept.add(made.data_ptr())
        return made

    room = FileBehind.room
    monkeypatch.setattr(FileBehind, "room", kept_room)
    monkeypatch.setattr("kvloom.carry.files.writing.os.pwrite", late)
    monkeypatch.setattr("kvloom.carry.files.writing._HELD", 1024)
    write_mlx(cache_of(23), tmp_path / "late", pairs="adjacent")
    assert (tmp_path / "late").read_bytes() == (tmp_path / "quick").read_bytes()
    assert 1 < len(kept) < 20  # of 92 parts, four of which wait
