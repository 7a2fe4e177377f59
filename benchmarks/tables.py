"""Tables in Markdown, and the sentence about peers that are not there."""

from collections.abc import Iterable
from typing import Any


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pivot(rows: list[dict[str, Any]], down: str, across: str, cell: str, form: str) -> str:
    """One row for each value of ``down``, one column for each of ``across``; empty where nothing was."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    found = {(row[down], row[across]): format(row[cell], form) for row in rows}
    names = dict.fromkeys(row[down] for row in rows)
    return table(
        ["", *map(str, columns)],
        ([str(name), *(found.get((name, x), "") for x in columns)] for name in names),
    )


def cell(text: str, row: str, column: str) -> str:
    """The cell of the first table in ``text`` that has the row and the column, by their names."""
    head: list[str] = []
    for line in text.splitlines():
        names = [x.strip() for x in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = names
        elif names[0] == row and column in head:
            return names[head.index(column)]
    raise KeyError(f"no table with {row!r} and {column!r}")


def left_out(result: dict[str, Any]) -> str:
    """Names what was not measured, and why."""
    missing = result.get("missing")
    return f" Not measured: {'; '.join(missing)}." if missing else ""
