"""A file holds one idea, so none is long."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = {".py": 400, ".cpp": 600, ".h": 600}
FOLDERS = ("src", "tests", "scripts", "benchmarks", "csrc")
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in MAX_LINES
)


def test_files_are_short() -> None:
    assert len(SOURCES) > 500
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    long = {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MAX_LINES[path.suffix]}
    assert long == {}, "split them by idea"
