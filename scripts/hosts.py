"""Runs the tests of every version and host that can run here, and writes docs/versions.md.

``make test-hosts`` runs all, which takes hours; ``make test-hosts HOSTS='lmcache torch'`` some. A row of the
page is replaced when its host was run; what cannot run here is printed, and its row stays.
"""

import argparse
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "versions.md"


class Host(NamedTuple):
    """What is tested.

    Attributes:
        target: Of make, or behind ``nox`` a session of noxfile.py.
        what: It tests.
        label: Before each version in what it prints; empty if it has one.
        version: Of that one; in what it prints, or said by ``make``'s variable of this name.
        tests: What they are.
    """

    target: str
    what: str
    label: str
    version: str
    tests: str


HOSTS: Final = {
    "python": Host("nox wheel", "Python", "Python ", "", "the wheel, and what needs no torch"),
    "torch": Host("nox torch", "torch", "torch ", "", "operators and caches"),
    "isa": Host("test-isa", "x86-64 instructions", "KVLOOM_ISA=", "", "kernels, all products"),
    "arm": Host("test-arm", "Arm, emulated", "", "NEON", "kernels"),
    "triton": Host("test-triton", "Triton", "", "interpreted or on a GPU", "kernels"),
    "transformers": Host("nox transformers", "transformers", "transformers ", "", "all integrations"),
    "vllm": Host("test-vllm", "vLLM", "", "VLLM", "the engine with int8 and int4 pages, and stores"),
    "clients": Host("test-clients", "clients", "client ", "", "what they ask, generate and evict"),
    "vllm-python": Host(
        "test-vllm-python", "vLLM's Python", "", "VLLM_PYTHON", "the same, over compiled parts of the other"
    ),
    "lmcache": Host("test-lmcache", "LMCache", "", "LMCACHE", "its reading of layouts"),
    "engines": Host(
        "test-engines",
        "llama-cpp-python",
        "",
        "LLAMA",
        "caches of it, mlx-lm, OpenVINO and ONNX Runtime go on in each other",
    ),
}


class Row(NamedTuple):
    """A row of the page."""

    what: str
    version: str
    tests: str
    result: str
    where: str


_SUMMARY: Final = re.compile(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in ")
_NOT_HERE: Final = "not here"
_ABSENT: Final = re.compile(r"^(?:no (\S+)|not) on this machine")


def results_of(lines: Iterable[str], label: str) -> Iterator[tuple[str, str]]:
    """Versions and what became of each, from what ``make`` prints.

    Args:
        lines: Without line ends.
        label: Before each version; empty if there is one.

    Yields:
        A version, or ``""``, and a sum such as ``"24 passed"``; or that it is not here.
    """
    version = ""
    for line in lines:
        if label and line.startswith(label) and " " not in line[len(label) :]:
            version = line[len(label) :]
        elif found := _ABSENT.match(line):
            yield (found[1] or version).removeprefix("python"), _NOT_HERE
        elif found := _SUMMARY.match(line):
            yield version, found[1]


def has_failed(result: str) -> bool:
    """Whether a sum has failures."""
    return "failed" in result or "error" in result


def run(name: str, when: str) -> list[Row]:
    """Run one host and show what it prints; the rows of its versions."""
    host, lines = HOSTS[name], []
    session = host.target.removeprefix("nox ")
    command = ["make", session] if session == host.target else [".venv/bin/nox", "-s", session]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            lines.append(line.rstrip())
    results = dict(results_of(lines, host.label))
    if not results or (process.returncode and not any(map(has_failed, results.values()))):
        results[""] = f"{_NOT_HERE}: {' '.join(command)} ended with {process.returncode}"
    where = f"{when}, {runpy.run_path(str(ROOT / 'benchmarks' / 'processor.py'))['name']()}"
    return [
        Row(host.what, version or variable(host.version), host.tests, result, where)
        for version, result in results.items()
    ]


def variable(name: str) -> str:
    """The value that the Makefile gives a variable, as a version; the name itself if there is none."""
    found = re.search(rf"^{re.escape(name)} \?= .*?==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return found[1] if found else name


def read(page: str) -> dict[tuple[str, str], Row]:
    """The rows of the page."""
    cells = ([x.strip() for x in line.strip("|").split("|")] for line in page.splitlines() if "|" in line)
    rows = [Row(*x) for x in cells if len(x) == len(Row._fields)][2:]
    return {(row.what, row.version): row for row in rows}


def write(rows: Iterable[Row]) -> str:
    """The page."""
    order = [host.what for host in HOSTS.values()]
    lines = [
        "# Versions that are tested",
        "",
        "Written by `make test-hosts`, which runs what can run on a machine; each row is of the last time",
        "that it could. Every change is tested with the oldest and the newest of each, but vLLM and Arm.",
        "",
        "| what | version | tests | result | when and where |",
        "|---|---|---|---|---|",
    ]
    ordered = sorted(rows, key=lambda row: order.index(row.what))
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in ordered)]) + "\n"


def main() -> int:
    """Run, write, and say what could not run; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hosts", nargs="*", help=f"of {', '.join(HOSTS)}; all if none")
    names = parser.parse_args().hosts or [*HOSTS]
    if unknown := {*names} - {*HOSTS}:
        parser.error(f"hosts must be of {', '.join(HOSTS)}, got {', '.join(sorted(unknown))}")
    when = datetime.now(tz=timezone.utc).date().isoformat()
    absent, status = [], 0
    for name in names:
        for row in run(name, when):
            if row.result.startswith(_NOT_HERE):
                absent.append(f"{row.what} {row.version}: {row.result}")
                continue
            status |= has_failed(row.result)
            rows = read(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}  # another may have written
            rows[row.what, row.version] = row
            PAGE.write_text(write(rows.values()), encoding="utf-8")
    for text in absent:
        print(f"cannot run here: {text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
