"""Report of a run as one self-contained page of HTML."""

from html import escape
from pathlib import Path

from kvloom.conform.reports import arguments, coordinates, counted, summary
from kvloom.conform.running import Outcome, Report
from kvloom.conform.vectors import VERSION

_STYLE = Path(__file__).with_suffix(".css")


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
    numbers = {outcome: number for number, outcome in enumerate(report.outcomes)}
    failures = "".join(
        _failure(outcome, numbers[outcome], is_open=place == 0)
        for place, outcome in enumerate(report.failures)
    )
    skipped = "".join(
        f"<li>{escape(reason)}</li>"
        for reason in sorted({o.message for o in report.outcomes if o.status == "skipped"})
    )
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
{escape(report.dialect)} {escape(report.target)} --vector NUMBER</code></footer>
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
