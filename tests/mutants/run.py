"""Plants each bug of this folder in a copy of the sources, and sees whether the tests that it names fail.

    PYTHONPATH=tests python -m mutants.run [--jobs N] [NAME ...]

A patch says in its first lines what the bug is and, after ``Tests:``, which tests must notice. Its line
numbers do not count: what it replaces must stand in the file exactly once. One that changes ``csrc`` also
says, after ``ISA:``, with which instruction set its tests run; without that line it is the baseline. It is
compiled for that one, see ``kernels.py``, and left out where the machine lacks it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from mutants.kernels import CompileError, Kernels, build_kernels

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
HANG = 600
"""Seconds after which the tests of a mutant are said to hang; they need about five."""

# Run first in every interpreter, tests' own children too: an editable install would find the original.
_FIND_THE_COPY = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if not type(x).__module__.startswith("_editable_")]
"""


class PatchError(Exception):
    """A patch says too little, or does not fit the sources."""


@dataclass(frozen=True)
class Change:
    """Lines of one file, and those that a bug puts in their place."""

    path: str
    old: str
    new: str

    def made_in(self, text: str) -> str:
        """The file with the bug; raises PatchError where the lines are not there, or more than once."""
        text, times = re.subn(f"^{re.escape(self.old)}", lambda _: self.new, text, flags=re.MULTILINE)
        if times != 1:
            raise PatchError(f"{self.path} must have these lines once:\n{self.old}")
        return text


@dataclass(frozen=True)
class Mutant:
    """One bug: its name, a sentence, the tests that must notice it, and where it is planted.

    ``isa`` is the instruction set of a bug in ``csrc``, ``None`` of another.
    """

    name: str
    sentence: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]
    isa: str | None = None

    @classmethod
    def read(cls, path: Path) -> "Mutant":
        """From a patch."""
        header, *files = re.split(r"^--- a/.*\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        form = r"(?P<sentence>\S.*\.)\nTests: (?P<tests>\S.*)\n(?:ISA: (?P<isa>\S+)\n)?\n"
        found = re.fullmatch(form, header)
        if found is None:
            raise PatchError(f"{path.name} must begin with a sentence, a line 'Tests: ...' and an empty line")
        changes = tuple(change for file in files for change in _changes(file))
        if not changes:
            raise PatchError(f"{path.name} must change a file")
        isa, is_compiled = found["isa"], any(change.path.startswith("csrc/") for change in changes)
        if isa and not is_compiled:
            raise PatchError(f"{path.name} must change csrc, since it names an instruction set")
        isa = isa or ("baseline" if is_compiled else None)
        return cls(path.stem, found["sentence"], tuple(found["tests"].split()), changes, isa)

    def sources(self, root: Path) -> dict[Path, str]:
        """The files below ``root`` that the bug changes, with the bug in them."""
        texts: dict[Path, str] = {}
        for change in self.changes:
            path = root / change.path
            texts[path] = change.made_in(texts.get(path) or path.read_text(encoding="utf-8"))
        return texts

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """The bug is in the sources below ``root`` within this context."""
        after = self.sources(root)
        before = {path: path.read_text(encoding="utf-8") for path in after}
        try:
            for path, text in after.items():
                path.write_text(text, encoding="utf-8")
            yield
        finally:
            for path, text in before.items():
                path.write_text(text, encoding="utf-8")


def _changes(file: str) -> Iterator[Change]:
    """The hunks of one file of a patch, from its line ``+++`` on."""
    first, *hunks = re.split(r"^@@.*\n", file, flags=re.MULTILINE)
    for hunk in hunks:
        lines = [line or " \n" for line in hunk.splitlines(keepends=True)]
        old, new = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        yield Change(first.removeprefix("+++ b/").rstrip("\n"), old, new)


def patches(names: Sequence[str] = ()) -> list[Path]:
    """The patches of these names, all if there are none."""
    return [FOLDER / f"{name}.patch" for name in names] or sorted(FOLDER.glob("*.patch"))


def make_copy(root: Path) -> Path:
    """Sources and tests below ``root``, and what lets an interpreter find them."""
    for name in ("csrc", "src", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.patch"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "model").symlink_to(ROOT / "model")  # the bundled one, which need not be installed
    (root / "first").mkdir()
    (root / "first" / "sitecustomize.py").write_text(_FIND_THE_COPY)
    return root


def _run(
    root: Path, *args: str, kernels: Sequence[str] = (), limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Python in a copy, with this library and instruction set, or the best of what the original has."""
    libraries = Path(sysconfig.get_path("platlib")).glob("kvloom/ops/impl/libkvloom_cpu.*")
    environment = {"KVLOOM_LIBRARY": str(next(libraries, "")), **os.environ}
    environment |= zip(("KVLOOM_LIBRARY", "KVLOOM_ISA"), kernels, strict=False)
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "first"), str(root / "src")])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a changed file of the same size in the same second
    command = [sys.executable, *args]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )


def run_tests(
    root: Path, tests: Sequence[str], kernels: Sequence[str] = (), limit: float | None = None
) -> tuple[str, str]:
    """What became of some tests: ``passed``, ``failed``, ``crashed``, ``hung`` or ``broken``, and details."""
    pytest = ("-m", "pytest", "-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist")
    try:
        done = _run(root, *pytest, *tests, kernels=kernels, limit=limit)
    except subprocess.TimeoutExpired:
        return "hung", f"no answer in {limit} s"
    if done.returncode < 0:
        return "crashed", f"signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return "failed", failed[1].removeprefix("tests/")
    if done.returncode == 0:
        return "passed", ""
    return "broken", f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}"


def try_mutant(root: Path, mutant: Mutant, compiled: Kernels | None) -> tuple[bool, str]:
    """Whether the tests kill a mutant, and a line about it; ``compiled`` are the kernels without it."""
    started = time.monotonic()
    try:
        with mutant.planted(root):
            kernels: tuple[str, ...] = ()
            if compiled is not None and mutant.isa is not None:
                changed = {compiled.root / change.path for change in mutant.changes}
                kernels = str(compiled.made_with(root, changed, mutant.isa)), mutant.isa
            outcome, detail = run_tests(root, mutant.tests, kernels, HANG)
    except (PatchError, CompileError) as problem:
        outcome, detail = "unfit", str(problem)
    words = {"failed": "killed", "crashed": "killed (crash)", "hung": "killed (hang)", "passed": "SURVIVED"}
    word, seconds = words.get(outcome, outcome.upper()), time.monotonic() - started
    return word.startswith("killed"), f"{word:14}  {mutant.name:34} {seconds:4.0f} s  {detail}"


def check_without_bugs(root: Path, mutants: Sequence[Mutant], compiled: Kernels | None) -> None:
    """Exit unless the tests of all mutants pass in a copy, with the kernels that bugs are planted in."""
    found = Path(_run(root, "-c", "import kvloom; print(kvloom.__file__)").stdout.strip())
    if root not in found.parents:
        sys.exit(f"the tests would import {found} and not the copy in {root}")
    for isa in dict.fromkeys(mutant.isa for mutant in mutants):
        kernels = () if isa is None or compiled is None else (str(compiled.library), isa)
        tests = {test for mutant in mutants if mutant.isa == isa for test in mutant.tests}
        outcome, detail = run_tests(root, sorted(tests), kernels)
        if outcome != "passed":
            sys.exit(f"without a bug the tests must pass, got {outcome}: {detail}")


def isas_of(root: Path, compiled: Kernels) -> list[str]:
    """The instruction sets that this machine runs, emulated ones among them."""
    code = (
        "from kvloom.ops.impl import cpu\n"
        "print(*(isa for isa in cpu.ISAS if cpu._HANDLE.kvloom_why_not(isa.encode()) is None))"
    )
    return _run(root, "-c", code, kernels=[str(compiled.library)]).stdout.split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if every mutant is killed, by tests that pass without it."""
    parser = argparse.ArgumentParser(description="Plant bugs; the tests must fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a patch without its suffix; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    options = parser.parse_args(arguments)
    mutants = [Mutant.read(path) for path in patches(options.names)]
    compiled = build_kernels() if any(mutant.isa for mutant in mutants) else None
    with TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(make_copy(Path(folder, str(job))))
        root = copies.get()
        if compiled is not None:
            isas = {None, *isas_of(root, compiled)}
            for mutant in [mutant for mutant in mutants if mutant.isa not in isas]:
                print(f"{'not on this machine':14}  {mutant.name}: {mutant.isa}", flush=True)
            mutants = [mutant for mutant in mutants if mutant.isa in isas]
        check_without_bugs(root, mutants, compiled)
        copies.put(root)

        def attempt(mutant: Mutant) -> bool:
            root = copies.get()
            try:
                killed, line = try_mutant(root, mutant, compiled)
            finally:
                copies.put(root)
            print(line, flush=True)
            return killed

        with ThreadPoolExecutor(options.jobs) as pool:
            killed = sum(pool.map(attempt, mutants))
    print(f"{killed} of {len(mutants)} killed")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
