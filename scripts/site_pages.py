"""Pages that are made: of public names, of commands, of decisions, and of notebooks. Imports no torch."""

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Final

ALSO: Final = {
    "kvloom.errors": None,
    "kvloom.core.indexing": None,
    "kvloom.core.layouts": None,
    "kvloom.core.specs": None,
    "kvloom.core.views": None,
    "kvloom.graphics.svg": None,
}
"""Modules without ``__all__`` whose public names users meet."""


def public_names(sources: Path) -> dict[str, list[str]]:
    """Names in ``__all__`` of every package that has one, and public ones of ``ALSO``; by package.

    Args:
        sources: Folder that has the folder ``kvloom``.
    """
    found = {}
    for path in sorted((sources / "kvloom").rglob("__init__.py")):
        if names := _listed(ast.parse(path.read_text(encoding="utf-8"))):
            found[".".join(path.parent.relative_to(sources).parts)] = names
    for module in ALSO:
        tree = ast.parse((sources / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        defined = [x.name for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef)]
        found[module] = [name for name in defined if not name.startswith("_")]
    return dict(sorted(found.items()))


def homes() -> dict[str, str]:
    """Where the names of ``kvloom`` itself are: by name, a path that a reader of sources can follow."""
    from kvloom import _HOME

    return {name: f"kvloom.{home}.{name}" for name, home in _HOME.items()} | {"ops": "kvloom.ops"}


def api_pages(sources: Path) -> dict[str, str]:
    """Markdown of each package: its docstring, and that of each public name, by mkdocstrings."""
    pages, own = {}, homes()
    for package, names in public_names(sources).items():
        options = "    options:\n      members: false\n      show_root_toc_entry: false\n"
        text = f"# {package}\n\n::: {package}\n{options}"
        for name in names:
            if name == "__version__":
                continue
            path = f"{package}.{name}"
            if package == "kvloom":
                text += _section(name, own[name])
            elif path in own.values():  # described once
                text += f"\n## {name} {{ #{path}-too }}\n\nOn the page of [kvloom](kvloom.md#{path}).\n"
            else:
                text += f"\n::: {path}\n"
        pages[package] = text
    return pages


def _section(name: str, home: str) -> str:
    """A name of ``kvloom`` itself; of a module its docstring alone, as its names have a page."""
    is_module = home == f"kvloom.{name}"
    options = "\n    options:\n      members: false" if is_module else ""
    return f'\n<a id="kvloom.{name}"></a>\n\n::: {home}{options}\n'


def command_page() -> str:
    """Markdown of every command: how it is called, and its options with their defaults."""
    from kvloom.cli import _parser
    from kvloom.command_help import EXAMPLES, commands_of

    parser = _parser()
    parts = ["# Command line\n\nMade from the parsers of `kvloom`, as `kvloom COMMAND --help` says it.\n"]
    parts.append(f"{_plain(parser.description or '')}\n")
    parts += _options(parser)
    for name, command, _ in commands_of(parser):
        parts += [f"## {command.prog}\n", f"{_plain(command.description or '')}\n", *_options(command)]
        if name in EXAMPLES:
            parts.append(f"For example:\n\n```console\n{EXAMPLES[name]}\n```\n")
    return "\n".join(parts)


def decision_index(folder: Path) -> str:
    """Markdown of all decisions: number and title."""
    lines = []
    for path in sorted(folder.glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"* [{title}]({path.name})")
    return "# Decisions\n\nWhat would be asked about twice, and why it is so.\n\n" + "\n".join(lines) + "\n"


def notebook_page(path: Path) -> str:
    """Markdown of a notebook: its text, its code, and what that put out; tables and pictures as they are."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
            shown = data.get("image/svg+xml") or data.get("text/html")
            text = "".join(output.get("text", ())) or data.get("text/plain", "")
            parts.append(f"<div>{shown}</div>" if shown else f"```text\n{text.rstrip()}\n```")
    where = f"This page is a notebook of the repository, `examples/{path.name}`, with what it put out."
    return "\n\n".join([*parts, where]) + "\n"


def _listed(tree: ast.Module) -> list[str]:
    """The strings of ``__all__``; of ``kvloom``, the keys of its table of homes."""
    values = {
        x.targets[0].id: x.value
        for x in tree.body
        if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)
    }
    if not isinstance(listed := values.get("__all__"), ast.List):
        return []
    names: list[str] = []
    for item in listed.elts:
        if isinstance(item, ast.Starred) and isinstance(table := values["_HOME"], ast.Dict):
            names += [ast.literal_eval(key) for key in table.keys if key is not None]
        else:
            names.append(ast.literal_eval(item))
    return names


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """How a command is called, and what each of its arguments means, unless it only has other commands."""
    below = [x for x in parser._actions if isinstance(x, argparse._SubParsersAction)]
    shown = [x for x in parser._actions if x not in below and x.help != argparse.SUPPRESS]
    shown = [x for x in shown if not isinstance(x, argparse._HelpAction)]
    if below and not shown:
        return []
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    parts = [f"```console\n{usage}\n```\n"]
    if shown:
        formatter = parser._get_formatter()
        rows = "\n".join(f"| {_named(x)} | {_plain(formatter._expand_help(x))} |" for x in shown)
        parts.append(f"| argument | what it says |\n|---|---|\n{rows}\n")
    return parts


def _named(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 and action.option_strings else "")
    if action.choices is not None:
        value = ", ".join(map(str, action.choices))
    value = " ".join(value) if isinstance(value, tuple) else value
    names = ", ".join(action.option_strings) or (action.metavar or action.dest)
    return f"`{names}{' ' + value if value and action.option_strings and action.nargs != 0 else ''}`"


def _plain(text: str) -> str:
    """``text`` in Markdown: no cell of a table ends within it, and nothing of it is a tag."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
