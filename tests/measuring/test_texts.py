"""Texts that quality is measured on, by their names."""

from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from kvloom.errors import ArgumentError
from kvloom.measuring import texts
from kvloom.measuring.texts import PACKAGES, texts_named
from kvloom.models import corpus_files


@pytest.mark.parametrize("package", PACKAGES)
def test_sources_of_a_package_are_read_and_none_of_the_corpus(package: str) -> None:
    found = [*islice(texts_named(package), 8)]
    folder = Path(next(iter(find_spec(package).submodule_search_locations)))
    sources = {path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob("*.py")}
    assert len(set(found)) == 8
    assert sources.issuperset(found)
    assert not any(file.path.is_relative_to(folder) for file in corpus_files())


def test_sources_come_in_the_same_order_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []
    for place in ("one", "two"):
        package = tmp_path / place / "somebodys_package"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        for name in ("a", "b", "c", "d"):
            (package / f"{name}.py").write_text(f"# {name}\n" + "x = 1\n" * 500)
        (package / "table.py").write_text("x = 1\n" * 50_000)
        monkeypatch.setattr(texts, "PACKAGES", ("somebodys_package",))
        monkeypatch.setattr("sys.path", [str(package.parent)])
        orders.append([text[2] for text in texts_named("somebodys_package")])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == ["a", "b", "c", "d"]


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "torch"
    file.write_text("größe = 1\n", encoding="utf-8")
    assert [*texts_named(str(file))] == ["größe = 1\n"]


def test_what_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for name in (str(tmp_path / "binary"), str(tmp_path / "gone")):
        with pytest.raises(ArgumentError, match=r"^--text must be text in UTF-8: "):
            texts_named(name)
    monkeypatch.setattr(texts, "PACKAGES", ("kvloom_gone",))
    with pytest.raises(ArgumentError, match=r"^--text must be an installed package, got 'kvloom_gone'"):
        texts_named("kvloom_gone")
