"""What is printed: tables and sentences on standard output, progress on standard error, and reports.

In a pipe tables have no boxes, and no line is broken, so that other programs read a row in a line. Progress
is shown on a terminal alone, and is gone when the work is done.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_T = TypeVar("_T")

_ENDLESS: Final = 100_000
"""Width of a pipe, in characters."""


_WORDS: Final = {
    "kv": "kind",
    "nbytes_dynamic": "bytes in a DynamicCache",
    "nbytes_bfloat16": "bytes in bfloat16",
    "nbytes_per_token": "bytes a token",
    "smoothed": "layers with smoothed keys",
}
"""Names of a report that are said in other words."""


class TableReport(dict[str, Any]):
    """Numbers by name, printed as a table of two columns, in a terminal and in a notebook.

    A dictionary within has the name of its own before its names, and one of lists has its names as texts:
    what holds of which layers. What is ``None`` or empty is left out.
    """

    def __str__(self) -> str:
        rows = list(_rows(self))
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _repr_html_(self) -> str:
        rows = (f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in _rows(self))
        return f"<table>{''.join(rows)}</table>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def in_units(nbytes: float) -> str:
    """Bytes as people say them: ``1.32 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def _rows(numbers: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in numbers.items():
        words = before + _WORDS.get(name, str(name).replace("nbytes", "bytes").replace("_", " "))
        if isinstance(value, Mapping) and value and all(isinstance(x, list) for x in value.values()):
            for reason, places in value.items():
                yield f"{words} of layers {_told(words, places)}", str(reason)
        elif isinstance(value, Mapping):
            yield from _rows(value, f"{words}: ")
        elif value is not None and value != []:
            yield words, _told(words, value)


def _told(words: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | float() if "bytes" in words and value >= 1000:
            return f"{value:,.0f} ({in_units(value)})"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case list() | tuple():
            return ", ".join(str(x) for x in value)
    return str(value)


def console(least_width: int = 0, *, markup: bool = False) -> "Console":
    """Standard output; a print to a closed pipe raises BrokenPipeError, as any other write.

    Args:
        least_width: Least width of a terminal, in characters, below which it breaks lines by itself.
        markup: Whether texts have rich's markup.
    """
    from rich.console import Console

    class _Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704, called where it is handled

    made = _Output(highlight=False, markup=markup)
    made.width = max(made.width, least_width) if made.is_terminal else _ENDLESS
    return made


def table(*headings: str, texts: Collection[str] | None = None, title: str = "") -> "Table":
    """A table, to print on a ``console``; cells of texts are to the left and may be folded.

    Args:
        headings: Headings of the columns.
        texts: Those of columns of texts; the others have numbers. ``None`` for the first.
        title: Title; none if empty.
    """
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title or None)
    if not Console().is_terminal:
        made.box, made.title_justify = None, "left"
    for heading in headings:
        is_text = heading in (headings[:1] if texts is None else texts)
        made.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return made


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Context of work that may take seconds; yields a function that is told how much is done.

    Args:
        what: What is done, or what is counted.
        total: How much there is to do; ``None`` if it is not known.
    """
    if not is_shown():
        yield lambda done: None
        return
    with bar() as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Context of work that may take seconds, and of which nobody knows how much is done.

    Args:
        what: What is done; nothing else is printed meanwhile.
    """
    if not is_shown():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def is_shown() -> bool:
    """Whether standard error is a terminal, so that progress is shown."""
    return sys.stderr is not None and sys.stderr.isatty()


def bar(*columns: Any) -> "Progress":
    """A progress bar of rich, with the time that is left unless columns are given."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_shown())


def tracked(things: Sequence[_T], what: str) -> Iterator[_T]:
    """Iterate over things with a progress bar."""
    with progress(what, len(things)) as tell:
        for number, thing in enumerate(things):
            yield thing
            tell(number + 1)


def counted(things: Iterable[_T], what: str) -> Iterator[_T]:
    """Iterate over things of which nobody knows how many there are, and show how many there were."""
    with progress(what) as tell:
        for number, thing in enumerate(things):
            if number % 1000 == 0:
                tell(number)
            yield thing
