"""Vectors: made from a seed, written as safetensors with a JSON manifest, and read again."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvloom import terminal
from kvloom.conform.describe import Argument, Call, Vector, bad_calls
from kvloom.conform.draw import Draw
from kvloom.conform.operators import OPERATORS
from kvloom.errors import ArgumentError

VERSION: Final = 3
"""Version of the set; it changes when any vector does."""
SEED: Final = 1
REFUSALS: Final = 20
"""Maximum number of calls of each operator that must be refused."""
_IN_CHECKOUT: Final = Path(__file__).parents[3] / "vectors/src/kvloom_conform/vectors"


def published() -> Path:
    """Folder of the published set.

    Raises:
        ModuleNotFoundError: ``kvloom-conform`` is not installed, and this is no checkout with its files.
    """
    if _IN_CHECKOUT.is_dir():
        return _IN_CHECKOUT
    from kvloom_conform import VECTORS

    return VECTORS


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Path:
        """``PUBLISHED``, the constant that ``published()`` was."""
        if name == "PUBLISHED":
            return published()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make(dialect: str, seed: int = SEED, count: int | None = None) -> Iterator[Vector]:
    """Make the vectors of a dialect: ``count`` legal calls (``None``: as published), then refused ones."""
    operator = OPERATORS[dialect]
    number = 0
    refusals: dict[tuple[str, str], tuple[str, Call]] = {}
    for number in range(operator.count if count is None else count):
        draw = Draw(f"{seed}:{dialect}:{number}")
        about, call = operator.draw(draw)
        call = {name: x for name, x in call.items() if x is not None}
        yield Vector(f"{dialect}/{number}", dialect, about, call, operator.oracle(call))
        if number < 12:
            for what, argument, bad in bad_calls(operator, call, draw):
                refusals.setdefault((argument, what), (about, bad))
    kinds = list(refusals)
    Draw(f"{seed}:{dialect}:refused").random.shuffle(kinds)
    for more, (argument, what) in enumerate(kinds[:REFUSALS], number + 1):
        bad = {name: x for name, x in refusals[argument, what][1].items() if x is not None}
        yield Vector(f"{dialect}/{more}", dialect, f"{argument} {what}", bad, None, argument)


def write(folder: Path, dialects: list[str], seed: int = SEED, count: int | None = None) -> dict[str, Any]:
    """Write the vectors of ``dialects`` to ``folder`` and return its index."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"format": "kvloom-vectors", "version": VERSION, "seed": seed, "dialects": {}}
    for dialect in terminal.tracked(dialects, "dialects"):
        operator, tensors = OPERATORS[dialect], dict[str, Tensor]()
        entries = [_entry(vector, tensors) for vector in make(dialect, seed, count)]
        file = folder / f"{dialect}.safetensors"
        save_file(tensors, file)
        manifest = {
            "format": "kvloom-vectors",
            "version": VERSION,
            "dialect": dialect,
            "document": operator.document,
            "arguments": [_argument(a) for a in operator.arguments],
            "results": {name: operator.how(name) for name in (*operator.outputs, *operator.updated)},
            "vectors": entries,
        }
        text = json.dumps(manifest, separators=(",", ":"))
        file.with_suffix(".json").write_text(text, encoding="utf-8")
        index["dialects"][dialect] = {
            "legal": sum("expected" in entry for entry in entries),
            "refused": sum("refused" in entry for entry in entries),
            "manifest_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tensors_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def read(folder: Path, dialect: str) -> Iterator[Vector]:
    """Read the vectors of a dialect that ``write`` wrote.

    Raises:
        ArgumentError: the files are not those that the index names.
    """
    from safetensors.torch import load

    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    if dialect not in index["dialects"]:
        raise ArgumentError(f"dialect must be one of {', '.join(index['dialects'])}, got {dialect!r}")
    data = (folder / f"{dialect}.safetensors").read_bytes()
    text = (folder / f"{dialect}.json").read_bytes()
    for kind, content in (("tensors", data), ("manifest", text)):
        if hashlib.sha256(content).hexdigest() != index["dialects"][dialect][f"{kind}_sha256"]:
            raise ArgumentError(
                f"vectors of {dialect} must be those of the index: the hash of the {kind} differs"
            )
    tensors = load(data)
    for entry in json.loads(text)["vectors"]:
        call = {name: _read_value(x, tensors) for name, x in entry["call"].items()}
        expected = None
        if "expected" in entry:
            expected = {name: tensors[key] for name, key in entry["expected"].items()}
        yield Vector(entry["name"], dialect, entry["about"], call, expected, entry.get("refused", ""))


def _entry(vector: Vector, tensors: dict[str, Tensor]) -> dict[str, Any]:
    number = vector.name.rpartition("/")[2]
    call = {name: _written(f"{number}.in.{name}", x, tensors) for name, x in vector.call.items()}
    entry: dict[str, Any] = {"name": vector.name, "about": vector.about, "call": call}
    if vector.expected is None:
        return {**entry, "refused": vector.refused}
    entry["expected"] = {}
    for name, x in vector.expected.items():
        key = f"{number}.out.{name}"
        tensors[key] = (x.float() if x.dtype == torch.float64 else x).contiguous().clone()
        entry["expected"][name] = key
    return entry


def _written(key: str, x: Any, tensors: dict[str, Tensor]) -> Any:
    """Entry of an argument in the manifest; a view is written with the memory that it is a view of."""
    if isinstance(x, list) and x and isinstance(x[0], Tensor):
        return [_written(f"{key}.{i}", each, tensors) for i, each in enumerate(x)]
    if not isinstance(x, Tensor):
        return x
    memory = x.untyped_storage().nbytes() // x.itemsize
    if x.is_contiguous() and memory == x.numel():
        tensors[key] = x.clone()
        return {"tensor": key}
    whole = torch.as_strided(x, (memory,), (1,), 0)
    tensors[key] = whole.clone()
    return {"tensor": key, "shape": [*x.shape], "strides": [*x.stride()], "offset": x.storage_offset()}


def _read_value(x: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(x, list) and x and isinstance(x[0], dict):
        return [_read_value(each, tensors) for each in x]
    if not isinstance(x, dict):
        return x
    stored = tensors[x["tensor"]].clone()
    return stored.as_strided(x["shape"], x["strides"], x["offset"]) if "shape" in x else stored


def _argument(argument: Argument) -> dict[str, Any]:
    said = {field.name: getattr(argument, field.name) for field in fields(argument)}
    del said["is_input"]
    return {name: x for name, x in said.items() if x not in (None, "", (), False)}


def having(vectors: Sequence[Vector], dialect: str, only: str) -> list[Vector]:
    """Those vectors whose attributes have some values, left out ones their default.

    Args:
        vectors: Vectors of one dialect.
        dialect: A key of ``OPERATORS``.
        only: Names and values: ``"cache_layout=0,quant_bit=8"``.

    Raises:
        ArgumentError: a name is no attribute of the operator, or no vector has these values.
    """
    operator, wanted = OPERATORS[dialect], dict[str, str]()
    names = [x.name for x in operator.arguments if not x.is_tensor]
    for part in only.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names or not value:
            raise ArgumentError(
                f"--only must be NAME=VALUE of the attributes {', '.join(names) or 'of the operator'}, "
                f"got {part!r}"
            )
        wanted[name] = value
    found = []
    for vector in vectors:
        call = operator.complete(vector.call)
        if all(str(call.get(name)) == value for name, value in wanted.items()):
            found.append(vector)
    if not found:
        raise ArgumentError(f"--only must leave vectors, got {only!r}, which none of {len(vectors)} has")
    return found


def argument_text(argument: Argument) -> str:
    """Describe an argument in one line."""
    words = []
    if argument.is_tensor:
        shape = argument.shape
        if isinstance(shape, Mapping):
            words.append(" or ".join(f"[{axes}] ({argument.shape_of} {n})" for n, axes in shape.items()))
        else:
            words.append(f"[{shape}]")
        of = argument.dtypes
        words.append(f"dtype of {of[1:]}" if of[0] == "=" else " or ".join(of.split()))
    elif argument.only:
        words.append("one of " + ", ".join(map(str, argument.only)))
    elif argument.low is not None:
        words.append(f"at least {argument.low}")
    if not argument.is_tensor and argument.default not in (None, ()):
        words.append(f"{argument.default} if left out")
    if argument.is_updated:
        words.append("updated in place")
    if argument.is_optional:
        words.append("optional")
    return ", ".join(words)
