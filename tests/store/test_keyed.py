"""Stores under a key: what is not summed under it is used by nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from store.runs import make_run
from store.test_store import WHOSE, content, found, save

from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.store import KVStore
from kvloom.store.format import DamagedRun, read_head
from kvloom.store.sums import Sums

KEY, OTHER = b"k" * 32, b"o" * 32


def test_only_those_who_have_the_key_find_what_was_written_under_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with KVStore(url, key=KEY) as store:
        save(store, [1, 2])
    for key, expected in ((KEY, 2), (OTHER, 0), (None, 0)):
        with KVStore(url, key=key, read="always") as store:
            assert found(store, [1, 2]) == expected
            assert not store.tiers[0].counts["damaged"]
    for key in (OTHER, None):
        with KVStore(url, key=key) as store:
            save(store, [1, 2])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
    with KVStore(url, key=KEY, read="always") as store:
        assert found(store, [1, 2]) == 2


class Forged(Sums):
    """Those of someone without the key, who writes what the header of a keyed run says."""

    @property
    def format(self) -> str:
        return Sums(KEY).format


@pytest.mark.parametrize(
    "forger", [Sums(), Sums(OTHER), Forged()], ids=["no key", "another key", "no key, another header"]
)
def test_what_is_forged_without_the_key_is_not_read(forger: Sums, tmp_path: Path) -> None:
    """Other pages and another head, under sums that are right for whoever made them."""
    url = f"file://{tmp_path}"
    with KVStore(url, key=KEY) as store:
        save(store, [1, 2])
    (path,) = tmp_path.rglob("*.safetensors")
    run, _ = make_run([1, 2])
    data = content([3, 4])
    forged = replace(run, sums=forger).with_checksums(memoryview(data))
    path.write_bytes(forged.head() + data)
    with KVStore(url, key=KEY, read="always") as store:
        assert found(store, [1, 2]) == 0


def test_every_byte_counts_under_a_key() -> None:
    run, data = make_run([1, 2, 3, 4])
    sums = Sums(KEY)
    keyed = replace(run, sums=sums).with_checksums(memoryview(data))
    head = keyed.head()
    size = len(head) + len(data)
    assert read_head(head, size, sums) == (keyed, len(head))
    for at in range(len(head)):
        changed = bytearray(head)
        changed[at] ^= 1
        with pytest.raises(DamagedRun):
            read_head(bytes(changed), size, sums)


@pytest.mark.parametrize("key", [b"short", b"l" * 65, "k" * 32, 7])
def test_what_is_no_key_is_refused_and_not_shown(key: object) -> None:
    with pytest.raises(ArgumentError, match="key must be 16 to 64 bytes, got") as refusal:
        KVStore("memory://", key=key)  # type: ignore[arg-type]
    assert "lll" not in str(refusal.value) and "kkk" not in str(refusal.value)
    assert "kkk" not in repr(Sums(KEY))


def test_a_key_is_given_to_commands_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_bytes(KEY)
    folder = tmp_path / "store"
    with KVStore(f"file://{folder}", key=KEY) as store:
        save(store, [1, 2])
    assert main(["store", "verify", str(folder), "--key-file", str(tmp_path / "key")]) == 0
    assert "1 of 1 runs are whole" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        main(["store", "verify", str(folder)])
    assert "of another format" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for action, name in (("ls", "store"), ("ls", "empty"), ("verify", "empty")):
        assert main(["store", action, str(tmp_path / name), "--key-file", str(tmp_path / "none")]) == 2
        assert "key file must be one that can be read" in capsys.readouterr().err


def test_folders_of_keys_differ() -> None:
    folders = {Sums(key).folder(WHOSE.digest) for key in (None, KEY, OTHER)}
    assert len(folders) == 3 and WHOSE.folder in folders
