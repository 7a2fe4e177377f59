"""A file holds one idea, so none is long."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = {".py": 400, ".cpp": 600, ".h": 600}
FOLDERS = ("src", "tests", "scripts", "benchmarks", "csrc")
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in MAX_LINES
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_is_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES[path.suffix], (
        f"{path.relative_to(ROOT)} has {num_lines} lines; split it by idea"
    )
