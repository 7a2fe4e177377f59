"""Tables of ``kvloom bench serve``: a column for each server, or a line for each rate."""

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

_TIMES = (("first_token_ms", "to the first token"), ("between_tokens_ms", "between tokens"))


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Print a table of runs, each as in ``kvloom bench serve --json``, and notes below it."""
    from rich.console import Console

    table, width = (_side_by_side(runs), "80") if runs[0]["rate"] is None else (_by_rate(runs), "100")
    console = Console(width=int(os.environ.get("COLUMNS", width)))
    console.print(table)
    for run in runs:
        beginning = "" if len(runs) == 1 else f"{server_of(run)}{_at(run)}: "
        for text in (run.get("answers", {}).get("says"), run["note"]):
            if text is not None:
                console.print(f"{beginning}{text}")


def server_of(run: dict[str, Any]) -> str:
    """Host and port of a run's server."""
    return urlsplit(str(run["url"])).netloc


def _at(run: dict[str, Any]) -> str:
    return "" if run["rate"] is None else f" at {run['rate']:g}/s"


def _side_by_side(runs: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    first = runs[0]
    title = f"{first['model']}: {first['scenario']}, {first['clients']} clients"
    table = Table(title=title, show_header=len(runs) > 1)
    table.add_column()
    for run in runs:
        table.add_column(f"{run['model']} at {server_of(run)}", justify="right")
    rows = {
        "requests": [
            f"{x['ended']} ended, {x['refused']} refused, {x['failed']} failed in {x['seconds']:.1f} s"
            for x in runs
        ],
        "new tokens per second": [f"{x['new_tokens_per_s']:,.1f}" for x in runs],
        "requests per second": [f"{x['requests_per_s']:,.2f}" for x in runs],
        "prompt tokens found": [f"{x['hit_rate']:.1%} of {x['prompt_tokens']:,}" for x in runs],
        "prompt words repeated": [f"{x['repeat_rate']:.1%} with --seed {x['seed']}" for x in runs],
    }
    for name, title in _TIMES:
        rows[f"{title}, ms"] = [", ".join(f"{p} {ms:,.1f}" for p, ms in x[name].items()) for x in runs]
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def _by_rate(runs: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    first = runs[0]
    table = Table(
        title=f"{first['model']}: {first['scenario']}, --seed {first['seed']}; times in ms, p50 and p90"
    )
    if len({run["url"] for run in runs}) > 1:
        table.add_column("server", no_wrap=True)
    for name in ("rate", "tokens/s", *(name for _, name in _TIMES), "found", "refused"):
        table.add_column(name, justify="right")
    for run in runs:
        row = [server_of(run)] if len(table.columns) > 6 else []
        row += [f"{run['rate']:g}", f"{run['new_tokens_per_s']:,.1f}"]
        row += [" ".join(f"{run[name][p]:,.1f}" for p in ("p50", "p90")) for name, _ in _TIMES]
        row += [f"{run['hit_rate']:.1%}", f"{run['refused'] + run['failed']}"]
        table.add_row(*row)
    return table
