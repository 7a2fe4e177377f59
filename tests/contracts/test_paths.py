"""A page of documentation names no file that is not there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED = re.compile(r"\.git|\.venv.*|\..*_cache|\.hypothesis|__pycache__|build|dist|.*\.egg-info")
SUFFIXES = "cpp|h|json|md|py|safetensors|toml|txt|yml|yaml"
NAMED = re.compile(rf"[\w*][\w*./-]*\.(?:{SUFFIXES})(?![\w.])|`([\w*.-]+/[\w*./-]*)`")
LINKED = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")
FOREIGN = {
    "README.md": {"path/to/model", "notes.txt"},
    "benchmarks/gpu_results.md": {"gpu_results.json"},
    "docs/decisions/0006-compiled-kernels-behind-the-stable-abi.md": {"Python.h", "torch/extension.h"},
    "examples/README.md": {"examples/NAME.py"},
    "src/kvloom/models/stdlib-4m/MODEL_CARD.md": {"html/entities.py", "stringprep.py"},
}
"""What belongs to others, stands for any name, or is still to be written by a command."""


def everything(folder: Path) -> list[Path]:
    """Files and folders of the repository."""
    found = []
    for path in folder.iterdir():
        if IGNORED.fullmatch(path.name):
            continue
        found.append(path)
        if path.is_dir():
            found += everything(path)
    return found


PATHS = everything(ROOT)
NAMES = ["/" + str(path.relative_to(ROOT)) for path in PATHS]
PAGES = sorted(path for path in PATHS if path.suffix == ".md")


def exists(name: str) -> bool:
    """Whether some path ends with ``name``, in which ``*`` stands for any part of a name."""
    pattern = re.compile("/" + re.escape(name.rstrip("/")).replace(r"\*", "[^/]*") + "$")
    return any(pattern.search(path) for path in NAMES)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    text = re.sub(r"https?://\S+", "", page.read_text(encoding="utf-8"))
    foreign = FOREIGN.get(str(page.relative_to(ROOT)), set())
    named = {match[1] or match[0] for match in NAMED.finditer(text)}
    missing = sorted(name for name in named - foreign if not exists(name))
    assert not missing, f"{page.relative_to(ROOT)} names {missing}"
    broken = [link for link in LINKED.findall(text) if not (page.parent / link).exists()]
    assert not broken, f"{page.relative_to(ROOT)} links to {broken}"


def test_invariants_cite_tests() -> None:
    rows = [
        line for line in (ROOT / "INVARIANTS.md").read_text(encoding="utf-8").splitlines() if "| KV-" in line
    ]
    assert rows
    for row in rows:
        assert "`tests/" in row or "`make " in row, row
