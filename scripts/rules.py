"""Sizes and names that the sources keep to: what ``make check`` says beside ruff, mypy and import-linter.

A file has at most 250 lines of code (no docstrings, comments, blanks or imports), a class 25 methods, a
folder 15 files and 8 floors: modules of it that import one another in a row. A public class name is used
once. Exceptions are in ``pyproject.toml``, each with the most that it may have and a reason; one that is no
longer needed is an error.
"""

import ast
import collections
import graphlib
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import Any, Final

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).parents[1]
MOST: Final = {"lines": 250, "methods": 25, "files": 15, "floors": 8, "names": 1}
_NO_CODE: Final = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
)  # fmt: skip


def lines_of_python(text: str) -> int:
    """Lines of code of a module, without docstrings, comments, blanks and imports."""
    lines, skipped = set[int](), set[int]()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (is_text and isinstance(node.value.value, str)):
            skipped.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)


def lines_of_cpp(text: str) -> int:
    """Lines of code of a C++ file, without comments, blanks and includes."""
    bare = re.sub(r"//[^\n]*|/\*.*?\*/|^#include[^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(line.strip()) for line in bare.splitlines())


def floors(graph: grimp.ImportGraph, package: str) -> int:
    """Modules and folders of a package that import one another in a row; CycleError if in a circle."""
    below: dict[str, set[str]] = {child: set() for child in graph.find_children(package)}
    for child in below:
        for module in {child, *graph.find_descendants(child)}:
            for imported in graph.find_modules_directly_imported_by(module):
                other = ".".join(imported.split(".")[: child.count(".") + 1])
                if other in below and other != child:
                    below[child].add(other)
    height: dict[str, int] = {}
    for child in graphlib.TopologicalSorter(below).static_order():
        height[child] = 1 + max((height[x] for x in below[child]), default=0)
    return max(height.values(), default=0)


def measured(root: Path, graph: grimp.ImportGraph) -> dict[str, dict[str, int]]:
    """What each rule counts: by file, class, folder or name."""
    found: dict[str, dict[str, int]] = {rule: {} for rule in MOST}
    names: collections.Counter[str] = collections.Counter()
    for path in sorted((root / "src").rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        found["lines"][name] = lines_of_python(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                names[node.name] += not node.name.startswith("_")
                methods = [x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
                found["methods"][f"{name}:{node.name}"] = len(methods)
        folder = path.parent.relative_to(root).as_posix()
        found["files"][folder] = found["files"].get(folder, 0) + 1
    for path in sorted(x for x in (root / "csrc").rglob("*") if x.suffix in (".h", ".cpp")):
        found["lines"][path.relative_to(root).as_posix()] = lines_of_cpp(path.read_text(encoding="utf-8"))
    packages = [x for x in graph.modules if graph.find_children(x)]
    found["floors"] = {f"src/{x.replace('.', '/')}": floors(graph, x) for x in packages}
    found["names"] = dict(names)
    return found


def broken(found: dict[str, dict[str, int]], exceptions: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each thing that breaks a rule, and for each exception that nothing needs."""
    said = []
    for rule, most in MOST.items():
        excepted = exceptions.get(rule, {})
        for name, count in found[rule].items():
            allowed = excepted[name][0] if name in excepted else most
            if count > allowed:
                said.append(f"{name} must have at most {allowed} {rule}, got {count}")
        said += [
            f"{name} needs no exception of {rule}, got {found[rule].get(name, 0)} of {most}"
            for name in excepted
            if found[rule].get(name, 0) <= most
        ]
    return said


def main() -> int:
    """Print what is broken; status 1 if anything is."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    said = broken(measured(ROOT, grimp.build_graph("kvloom")), tomllib.loads(text)["tool"]["rules"])
    print("\n".join(said) or "rules: kept")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
