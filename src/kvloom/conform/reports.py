"""Reports of a run: in the terminal, as JSON, as JUnit XML, and as one self-contained page of HTML."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from torch import Tensor

from kvloom import terminal
from kvloom.conform.causes import Cause
from kvloom.conform.describe import describe_tensor
from kvloom.conform.judging import named
from kvloom.conform.running import Outcome, Report
from kvloom.conform.vectors import VERSION
from kvloom.graphics.machine import this_machine

_SHOWN = 5
"""Maximum number of failures, and of reasons, in the terminal."""
_VALUES = 16
_STYLE = Path(__file__).with_suffix(".css")


@contextmanager
def progress(dialect: str, total: int) -> Iterator[Callable[[Outcome], None]]:
    """Context with a progress bar, only on a terminal; yields a function that counts an outcome."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    failures = TextColumn("{task.fields[failed]} failed")
    columns = (TextColumn(dialect), BarColumn(), MofNCompleteColumn(), failures)
    with terminal.bar(*columns) as shown:
        task = shown.add_task("run", total=total, failed=0)
        failed = 0

        def tick(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.status == "failed"
            shown.update(task, advance=1, failed=failed)

        yield tick


def print_report(report: Report) -> None:
    """Print a report to the terminal."""
    from rich.markup import escape as plain

    console = terminal.console(markup=True)
    for outcome in report.failures[:_SHOWN]:
        console.print(
            f"[bold red]failed[/] [bold]{plain(outcome.vector.name)}[/]  {plain(outcome.vector.about)}"
        )
        console.print(f"  {plain(outcome.message)}")
        difference = outcome.difference
        if difference is not None and difference.at:
            console.print(f"  first at {plain(coordinates(outcome))}")
            console.print(f"    got      {difference.got}")
            console.print(f"    expected {difference.expected}")
        for cause in outcome.causes[:3]:
            console.print(f"  [yellow]{plain(cause.name)}[/]: {plain(cause.text)}")
    more = len(report.failures) - _SHOWN
    if more > 0:
        console.print(f"... and {more} more; --html FILE shows all of them")
    reasons = [*report.reasons.items()]
    for reason, count in reasons[:_SHOWN]:
        console.print(f"{count} skipped: {plain(reason)}")
    if len(reasons) > _SHOWN:
        rest = sum(count for _, count in reasons[_SHOWN:])
        console.print(
            f"{rest} skipped for {len(reasons) - _SHOWN} other reasons; --html FILE shows all of them"
        )
    if report.cause is not None:
        console.print(
            f"[bold]cause of {counted(report)}[/]: [yellow]{plain(report.cause.name)}[/]: "
            f"{plain(report.cause.text)}"
        )
    elif said := without_cause(report):
        console.print(plain(said))
    color = "green" if report.passed else "red"
    console.print(f"[bold {color}]{plain(report.dialect)}: {summary(report)}[/]")


def summary(report: Report) -> str:
    """Counts of outcomes: ``190 passed, 2 failed, 3 skipped``."""
    counts = [(status, report.count(status)) for status in ("passed", "failed", "skipped")]
    return ", ".join(f"{count} {status}" for status, count in counts if count or status != "skipped")


def counted(report: Report) -> str:
    """Number of failures that the cause of the run explains: ``all 12 failures``, ``10 of 12 failures``."""
    total = len(report.failures)
    return f"all {total} failures" if report.explained == total else f"{report.explained} of {total} failures"


def without_cause(report: Report) -> str:
    """Sentence for failures that no known mistake explains, with the nearest; empty if nothing differs."""
    if all(outcome.difference is None for outcome in report.failures):
        return ""
    if report.nearest is None:
        return "no known mistake explains a failure: `kvloom conform mistakes` lists them"
    total = len(report.failures)
    return (
        f"no single known mistake explains more than half of {total} failures; nearest, "
        f"{report.nearest_explained} of {total}: {report.nearest.name}: {report.nearest.text}"
    )


def coordinates(outcome: Outcome) -> str:
    """Coordinates of a difference: ``cache[T = 3, L = 0, 2 = 1, H = 0, E = 5]``."""
    difference = outcome.difference
    if difference is None:
        return ""
    return f"{difference.result}[{', '.join(f'{axis} = {at}' for axis, at in difference.at)}]"


def arguments(outcome: Outcome) -> list[tuple[str, str]]:
    """Name and description of each argument, with the values of small index tensors."""
    found = []
    for name, x in named(outcome.vector.call).items():
        text = repr(x)
        if isinstance(x, Tensor):
            text = describe_tensor(x) + ("" if x.is_contiguous() else f", strides {list(x.stride())}")
            if not x.is_floating_point() and x.ndim < 3 and 0 < x.numel() <= _VALUES:
                text += f" = {x.tolist()}"
        found.append((name, text))
    return found


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Outcome as a dict for JSON."""
    entry: dict[str, Any] = {
        "vector": outcome.vector.name,
        "about": outcome.vector.about,
        "must_be_refused": outcome.vector.expected is None,
        "status": outcome.status,
    }
    if outcome.message:
        entry["message"] = outcome.message
    if outcome.difference is not None:
        difference = outcome.difference
        entry["difference"] = {
            "result": difference.result,
            "at": dict(difference.at),
            "got": difference.got,
            "expected": difference.expected,
            "count": difference.count,
            "total": difference.total,
        }
    if outcome.causes:
        entry["causes"] = [cause._asdict() for cause in outcome.causes]
    return entry


def as_json(report: Report) -> str:
    """The report as JSON."""
    found = {
        "format": "kvloom-report",
        "vectors_version": VERSION,
        "machine": this_machine(),
        "dialect": report.dialect,
        "target": report.target,
        **{status: report.count(status) for status in ("passed", "failed", "skipped")},
        "cause": _explaining(report.cause, report.explained),
        "nearest": _explaining(report.nearest, report.nearest_explained),
        "reasons": report.reasons,
        "outcomes": [as_dict(outcome) for outcome in report.outcomes],
    }
    return json.dumps(found, indent=1) + "\n"


def as_junit(report: Report) -> str:
    """The report as JUnit XML."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"{report.dialect} {report.target}",
        tests=str(len(report.outcomes)),
        failures=str(report.count("failed")),
        skipped=str(report.count("skipped")),
        errors="0",
    )
    for outcome in report.outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname=report.dialect, name=f"{outcome.vector.name} {outcome.vector.about}"
        )
        if outcome.status == "failed":
            failure = ElementTree.SubElement(case, "failure", message=_plain(outcome.message))
            lines = [coordinates(outcome)] if outcome.difference else []
            if outcome.difference and outcome.difference.at:
                lines += [f"got {outcome.difference.got}", f"expected {outcome.difference.expected}"]
            lines += [f"{cause.name}: {cause.text}" for cause in outcome.causes]
            failure.text = _plain("\n".join(lines))
        elif outcome.status == "skipped":
            ElementTree.SubElement(case, "skipped", message=_plain(outcome.message))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _plain(text: str) -> str:
    """``text`` without characters that XML does not allow."""
    return "".join(c if c in "\n\t" or ord(c) >= 32 else "?" for c in text)


def _explaining(cause: Cause | None, count: int) -> dict[str, Any] | None:
    return None if cause is None else {**cause._asdict(), "explains": count}


def as_html(report: Report) -> str:
    """HTML page of a report."""
    verdict = "passed" if report.passed else "failed" if report.failures else "skipped"
    word = {"passed": "conforms", "failed": "differs", "skipped": "nothing ran"}[verdict]
    tiles = "".join(
        f'<div class="tile {status if count else ""}"><b>{count}</b><span>{status}</span></div>'
        for status in ("passed", "failed", "skipped")
        for count in [report.count(status)]
    )
    cells = "".join(_cell(outcome, number) for number, outcome in enumerate(report.outcomes))
    cause = ""
    if report.cause is not None:
        cause = (
            f'<div class="cause">Cause of {counted(report)}: '
            f"<b>{escape(report.cause.name)}</b><br>{escape(report.cause.text)}</div>"
        )
    elif said := without_cause(report):
        cause = f'<div class="cause">{escape(said)}</div>'
    numbers = {outcome: number for number, outcome in enumerate(report.outcomes)}
    failures = "".join(
        _failure(outcome, numbers[outcome], is_open=place == 0)
        for place, outcome in enumerate(report.failures)
    )
    skipped = "".join(f"<li>{count} x {escape(reason)}</li>" for reason, count in report.reasons.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.dialect)}: {summary(report)}</title>
<style>{_STYLE.read_text(encoding="utf-8")}</style>
</head>
<body><main>
<h1><code>{escape(report.dialect)}</code>
<span class="verdict {verdict}">{word}</span></h1>
<p class="sub">Target <code>{escape(report.target)}</code></p>
<div class="tiles">{tiles}</div>
<div class="grid">{cells}</div>
<p class="sub">One mark a vector, in order; round ones are calls that must be refused. Red ones lead to
their failure.</p>
{cause}
{"<h2>Failures</h2>" + failures if failures else ""}
{"<h2>Skipped</h2><ul>" + skipped + "</ul>" if skipped else ""}
<footer>kvloom conform, vectors of version {VERSION}. One vector again: <code>kvloom conform run --dialect
{escape(report.dialect)} {escape(report.target)} --vector NUMBER</code><br>{escape(this_machine())}</footer>
</main>
<script>
for (const mark of document.querySelectorAll("a[href]")) mark.onclick = () => {{
  document.querySelector(mark.getAttribute("href")).open = true;
}};
</script>
</body></html>
"""


def _cell(outcome: Outcome, number: int) -> str:
    kind = f"{outcome.status}{' refused' if outcome.vector.expected is None else ''}"
    title = escape(f"{outcome.vector.name}: {outcome.vector.about}")
    if outcome.status == "failed":
        return f'<a class="{kind}" title="{title}" href="#v{number}"></a>'
    return f'<i class="{kind}" title="{title}"></i>'


def _failure(outcome: Outcome, number: int, is_open: bool) -> str:
    rows = []
    difference = outcome.difference
    if difference is not None and difference.at:
        axes = " ".join(axis for axis, _ in difference.at)
        rows = [
            (
                "first difference",
                f"<code>{escape(coordinates(outcome))}</code> in the layout [{escape(axes)}]",
            ),
            ("got", f'<code class="got">{escape(difference.got)}</code>'),
            ("expected", f'<code class="want">{escape(difference.expected)}</code>'),
        ]
    found = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in rows)
    table = f"<table>{found}</table>" if found else ""
    causes = "".join(
        f'<div class="cause"><b>{escape(cause.name)}</b><br>{escape(cause.text)}</div>'
        for cause in outcome.causes[:3]
    )
    call = "".join(
        f"<tr><th><code>{escape(name)}</code></th><td><code>{escape(text)}</code></td></tr>"
        for name, text in arguments(outcome)
    )
    return (
        f'<details id="v{number}"{" open" if is_open else ""}><summary><b>{escape(outcome.vector.name)}</b>'
        f'<span>{escape(outcome.vector.about)}</span></summary><div class="body">'
        f"<p>{escape(outcome.message)}</p>{table}{causes}"
        f"<h2>Arguments</h2><table>{call}</table></div></details>"
    )
