"""``--plot FILE`` writes what its suffix says, or says before any work why it cannot."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.graphics import plot_file

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="4"><rect width="4" height="4"/></svg>'


def parsed(*options: str) -> Any:
    parser = argparse.ArgumentParser()
    plot_file.add_plot_option(parser, "a curve")
    return parser.parse_args(options).plot


@pytest.mark.parametrize("name", ["--plot", "--svg"])
def test_svg_is_written_as_it_is(name: str, tmp_path: Path) -> None:
    path = parsed(name, str(tmp_path / "x.svg"))
    plot_file.write_plot(path, SVG)
    assert path.read_text() == SVG
    assert parsed() is None


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("x.jpg", "a plot must end in .svg, .png, .pdf, got"),
        ("x", "a plot must end in .svg, .png, .pdf, got"),
        ("no/x.svg", "a plot must be in a folder that exists, got"),
        ("x.png", ".png needs cairosvg: pip install cairosvg"),
        ("x.pdf", ".pdf needs cairosvg: pip install cairosvg"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(
    file: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(plot_file, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as raised:
        parsed("--plot", str(tmp_path / file))
    assert raised.value.code == 2 and expected in capsys.readouterr().err


@pytest.mark.parametrize(("suffix", "function"), [(".png", "svg2png"), (".pdf", "svg2pdf")])
def test_other_suffixes_are_converted(
    suffix: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(**{function: lambda bytestring, **options: b"made of " + bytestring})
    monkeypatch.setitem(sys.modules, "cairosvg", made)
    monkeypatch.setattr(plot_file, "find_spec", lambda name: made)
    path = parsed("--plot", str(tmp_path / f"x{suffix}"))
    plot_file.write_plot(path, SVG)
    assert path.read_bytes() == b"made of " + SVG.encode()
