"""Executes the notebooks of examples and stores what they put out; with ``--check``, compares it instead.

Needs nbclient and ipykernel, which ``make docs`` installs beside what it needs. All of them run in one
kernel, which forgets its names in between, since loading torch takes longer than most of them.
"""

import os
import re
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "examples"
NOTEBOOKS: Final = tuple(sorted(FOLDER.glob("*.ipynb")))
SETTINGS: Final = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress"}
"""Of the kernel: one thread, and no bars of loading, which a notebook without widgets cannot draw."""
METADATA: Final = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_NEAR: Final = 0.05
"""By how much a decimal fraction may differ, of itself, or else by one in its last place: sums are rounded
otherwise on other processors, which moves a code of a cache here and there."""
_PIXELS: Final = 4.0
"""By how much a number of a picture may."""


def executed(paths: tuple[Path, ...] = NOTEBOOKS) -> Iterator[tuple[Path, Any]]:
    """Each path with its notebook, executed; an error of a cell is raised."""
    import nbformat
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient

    kernel = KernelManager(kernel_name="python3")
    options = {
        "timeout": None,
        "record_timing": False,
        "resources": {"metadata": {"path": str(FOLDER)}},
        "extra_arguments": ["--log-level=ERROR"],
    }
    try:
        for path in paths:
            notebook = nbformat.read(path, as_version=4)
            notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -sf"))
            NotebookClient(notebook, kernel, **options).execute(cleanup_kc=False, env=os.environ | SETTINGS)
            del notebook.cells[0]
            yield path, cleaned(notebook)
    finally:
        if kernel.has_kernel:
            kernel.shutdown_kernel(now=True)


def cleaned(notebook: Any) -> Any:
    """The notebook with what does not depend on who executed it."""
    notebook.metadata, numbers = METADATA, count(1)
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i}", {}
        if cell.cell_type == "code":
            cell.execution_count = next(numbers)
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Outputs with what was printed in one piece: how a kernel cuts it depends on how long it took."""
    made: list[Any] = []
    for output in outputs:
        last = made[-1] if made else {}
        if "stream" == output["output_type"] == last.get("output_type") and output["name"] == last["name"]:
            last["text"] = "".join(last["text"]) + "".join(output["text"])
        else:
            made.append(output)
    return made


def differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A sentence for each cell that does not put out what is stored.

    Words and whole numbers are the same; decimal fractions, and all numbers of a picture, are near.
    """
    said = []
    for old, new in zip(stored["cells"], now["cells"], strict=True):
        before, after = list(_texts(old)), list(_texts(new))
        if len(before) != len(after) or not all(map(_agree, before, after)):
            said.append(f"{old['id']} has {before} stored, and puts out {after}")
    return said


def _texts(cell: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Outputs of a cell, each with its kind."""
    for output in cell.get("outputs", ()):
        if output["output_type"] == "stream":
            yield output["name"], "".join(output["text"])
        for kind, text in sorted(output.get("data", {}).items()):
            yield kind, "".join(text)


def _agree(before: tuple[str, str], after: tuple[str, str]) -> bool:
    (kind, old), (new_kind, new) = before, after
    if kind != new_kind or _NUMBER.sub("#", old) != _NUMBER.sub("#", new):
        return False
    for a, b in zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True):
        room = _PIXELS if "svg" in kind else _room(a)
        if abs(float(a) - float(b)) > room:
            return False
    return True


def _room(number: str) -> float:
    """By how much a number may differ: if it is a decimal fraction by ``_NEAR``, or one in its last place."""
    digits, _, power = number.partition("e")
    if "." not in digits and not power:
        return 0
    last = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return max(_NEAR * abs(float(number)), 1.001 * last)


def main() -> int:
    """Execute all of them, and store what they put out; with ``--check`` print what is not what is stored."""
    import nbformat

    said = []
    for path, notebook in executed():
        name = path.relative_to(ROOT)
        if "--check" in sys.argv:
            said += [f"{name}: {x}" for x in differences(nbformat.read(path, as_version=4), notebook)]
        else:
            nbformat.write(notebook, path)
            print(name)
    print("\n".join(said))
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
