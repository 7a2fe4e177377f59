"""A page of documentation names no file, module or make target that does not exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED = re.compile(r"\.git|\.nox|\.venv.*|\..*_cache|\.hypothesis|__pycache__|build|dist|.*\.egg-info")
SUFFIXES = "cpp|h|json|md|patch|py|safetensors|svg|toml|txt|yml|yaml"
NAMED = re.compile(rf"[\w*][\w*./-]*\.(?:{SUFFIXES})(?![\w.])|`([\w*.-]+/[\w*./-]*)`")
LINKED = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")
MODULE = re.compile(r"\bkvloom((?:\.[A-Za-z_]\w*)+)")
TARGET = re.compile(r"`make ([a-z][\w-]*)|^make ([a-z][\w-]*)(?= *(?:#|$|[A-Z]+=))", re.MULTILINE)
FOREIGN = {
    "CHANGELOG.md": {"llama.cpp"},
    "README.md": {"llama.cpp", "path/to/model", "notes.txt"},
    "benchmarks/gpu_results.md": {"gpu_results.json"},
    "benchmarks/results.md": {"llama.cpp"},
    "docs/carry.md": {
        "again.bin.carried.json",
        "again.safetensors",
        "llama.cpp",
        "path/to/model",
        "prompt.safetensors",
        "prompt.txt",
    },
    "docs/comparison.md": {"llama.cpp"},
    "docs/conformance.md": {"call.json", "call.safetensors", "result.safetensors"},
    "docs/decisions/0006-compiled-kernels-behind-the-stable-abi.md": {"Python.h", "torch/extension.h"},
    "docs/decisions/0028-keys-are-rotated.md": {"llama.cpp"},
    "docs/decisions/0043-four-bits-have-sixteen-numbers.md": {"llama.cpp"},
    "docs/faq.md": {"llama.cpp", "path/to/model"},
    "docs/glossary.md": {"llama.cpp"},
    "docs/guides.md": {"llama.cpp", "path/to/model"},
    "docs/index.md": {"llama.cpp", "path/to/model"},
    "docs/install.md": {"path/to/model"},
    "docs/layouts.md": {"llama.cpp"},
    "docs/migration.md": {"llama.cpp", "path/to/model"},
    "docs/planning.md": {"path/to/model"},
    "docs/quality.md": {"llama.cpp", "notes.txt", "plan.json", "quality.svg", "report.txt", "summary.txt"},
    "docs/serving.md": {"run.json", "curve.png", "trace.jsonl"},
    "docs/start.md": {"notes.txt", "path/to/model"},
    "docs/store-format.md": {"kvloom-run/1", "kvloom-index/1"},
    "docs/store.md": {"path/to/model", "prompt.safetensors", "prompt.txt"},
    "docs/trace.md": {"a.txt", "b.txt"},
    "docs/vllm.md": {"argparse.py", "json/decoder.py", "calendar.py", "heapq.py", "queue.py", "csv.py"},
    "examples/README.md": {"examples/NAME.py", "llama.cpp"},
    "model/src/kvloom_model/stdlib-4m/MODEL_CARD.md": {"html/entities.py", "stringprep.py"},
    "tests/carry/golden/README.md": {"llama.cpp"},
}
"""Names of other projects, placeholders, and files that a command writes."""


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
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TORCH_OPERATORS = ("store", "load", "copy", "attend")  # torch calls them kvloom.store and so on


def exists(name: str) -> bool:
    """Whether some path ends with ``name``, in which ``*`` stands for any part of a name."""
    pattern = re.compile("/" + re.escape(name.rstrip("/")).replace(r"\*", "[^/]*") + "$")
    return any(pattern.search(path) for path in NAMES)


def named_paths(text: str) -> set[str]:
    return {match[1] or match[0] for match in NAMED.finditer(re.sub(r"https?://\S+", "", text))}


def wrong_modules(text: str) -> list[str]:
    """Modules, and names in modules, that do not exist."""
    wrong = []
    for match in MODULE.finditer(re.sub(r"https?://\S+", "", text)):
        place, names = ROOT / "src" / "kvloom", match[1].split(".")[1:]
        while names and ((place / names[0]).is_dir() or (place / f"{names[0]}.py").is_file()):
            place /= names.pop(0)
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        defined = source.read_text(encoding="utf-8") if source.is_file() else ""
        if names and not re.search(rf"\b{names[0]}\b", defined) and names[0] not in TORCH_OPERATORS:
            wrong.append(match[0])
    return wrong


def wrong_targets(text: str) -> list[str]:
    """Targets of ``make`` that the Makefile does not have."""
    named = {match[1] or match[2] for match in TARGET.finditer(text)}
    return sorted(name for name in named if not re.search(rf"^{re.escape(name)}:", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    missing = sorted(path for path in named_paths(text) - FOREIGN.get(name, set()) if not exists(path))
    assert not missing, f"{name} names {missing}"
    broken = [link for link in LINKED.findall(text) if not (page.parent / link).exists()]
    assert not broken, f"{name} links to {broken}"
    assert not wrong_modules(text), f"{name} names {wrong_modules(text)}"
    assert not wrong_targets(text), f"{name} names the targets {wrong_targets(text)}"


@pytest.mark.parametrize(
    "text", ["`tests/ops/test_gone.py`", "see gone.md", "`ops/gone/`", "`test_gone_*.py`", "growth_gone.svg"]
)
def test_a_wrong_path_is_found(text: str) -> None:
    assert not any(map(exists, named_paths(text))) and named_paths(text)


def test_a_wrong_module_or_target_is_found() -> None:
    assert wrong_modules("`kvloom.paging.gone`, `kvloom.paging.PagePool`") == ["kvloom.paging.gone"]
    assert wrong_targets("`make gone`, `make test`") == ["gone"]


def cited(row: str) -> list[str]:
    """Test paths in a row of INVARIANTS.md; a bare name belongs to the folder of the path before it."""
    paths: list[str] = []
    for name in re.findall(r"`(tests[\w./*-]*|test_[\w*]+\.py)`", row):
        before = Path(paths[-1]) if paths else Path()
        folder = before.parent if before.suffix else before
        paths.append(name if name.startswith("tests") else (folder / name).as_posix())
    return paths


def test_invariants_cite_tests() -> None:
    text = (ROOT / "INVARIANTS.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if "| KV-" in line]
    assert rows
    for row in rows:
        assert cited(row) or "`make " in row, row
        assert [path for path in cited(row) if not list(ROOT.glob(path))] == [], row


def test_a_bare_name_is_in_the_folder_before_it() -> None:
    row = "`tests/dialects/test_pmx_static.py`, `test_pmx_dynamic.py`; `tests/ops`, `test_pmx_dynamic.py`"
    assert cited(row)[1:] == [
        "tests/dialects/test_pmx_dynamic.py",
        "tests/ops",
        "tests/ops/test_pmx_dynamic.py",
    ]
