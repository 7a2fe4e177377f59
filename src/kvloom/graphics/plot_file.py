"""The options ``--plot FILE`` and ``--html FILE`` of commands that draw, and the picture, by its suffix."""

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_SUFFIXES: Final = (".svg", ".png", ".pdf")


def add_plot_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--plot FILE``, which is checked before the command does anything; ``--svg`` is its earlier name.

    Args:
        parser: Parser of a command.
        what: What is drawn, in its help.
    """
    told = f"draw {what}: a file that ends in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
    options: dict[str, Any] = {"dest": "plot", "type": _plot_file, "metavar": "FILE"}
    parser.add_argument("--plot", help=told, **options)
    parser.add_argument("--svg", help=argparse.SUPPRESS, **options)


def add_html_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--html FILE``, a page of results for others, checked before the command does anything."""
    told = "write a page to share: the table, its picture, this machine and its versions"
    parser.add_argument("--html", type=partial(_file_in, "a page"), metavar="FILE", help=told)


def _plot_file(text: str) -> Path:
    """A file that can be written, or an error of argparse."""
    path = Path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(f"a plot must end in {', '.join(_SUFFIXES)}, got {text!r}")
    _file_in("a plot", text)
    if path.suffix != ".svg" and find_spec("cairosvg") is None:
        raise argparse.ArgumentTypeError(f"{path.suffix} needs cairosvg: pip install cairosvg")
    return path


def _file_in(what: str, text: str) -> Path:
    """A file in a folder that exists, or an error of argparse."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{what} must be in a folder that exists, got {text!r}")
    return path


def write_plot(path: Path, svg: str) -> None:
    """Write a picture as its suffix says.

    Args:
        path: File that ``--plot`` gave.
        svg: The picture.
    """
    if path.suffix == ".svg":
        path.write_text(svg, encoding="utf-8")
        return
    import cairosvg

    write = cairosvg.svg2png if path.suffix == ".png" else cairosvg.svg2pdf
    path.write_bytes(write(bytestring=svg.encode(), **({"scale": 2} if path.suffix == ".png" else {})))
