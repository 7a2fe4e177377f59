"""What a file of a cache is, and what it says of itself, without a model."""

from collections import Counter
from itertools import groupby

from kvloom.carry.files.bytes import Cursor, Source, bytes_of
from kvloom.carry.files.tensor_file import read_tensors
from kvloom.carry.llama.state import FORMS, LlamaState, StoredCache, StoredRows, parse_state
from kvloom.carry.mlx.reading import read_mlx
from kvloom.errors import ArgumentError

FORMATS = ("llama.cpp", "mlx", "safetensors")
"""Names of formats of files: states of llama.cpp, prompt caches of mlx-lm, and arrays of exported models."""


def format_of(source: Source) -> str:
    """Which of ``FORMATS`` a file has.

    Raises:
        ArgumentError: it has none of them.
        OSError: it cannot be read.
    """
    data = bytes_of("source", source)
    [magic] = Cursor("source", data).numbers("I", "a magic number")
    if magic in FORMS.values():
        return "llama.cpp"
    try:
        stored, metadata = read_tensors(data)
    except ArgumentError as error:
        raise ArgumentError(f"source must be a file of {', '.join(FORMATS)}: {error}") from error
    if "2.0" in metadata:
        return "mlx"
    if any(name.startswith("past_key_values.") for name in stored):
        return "safetensors"
    raise ArgumentError(f"source must be a file of {', '.join(FORMATS)}, got other tensors")


def describe(source: Source) -> list[str]:
    """Lines that say what a file is; errors as of ``format_of``, or that it is damaged."""
    data = bytes_of("source", source)
    found = format_of(data)
    if found == "llama.cpp":
        return _of_llama(parse_state(data), len(data))
    if found == "mlx":
        return _of_mlx(data)
    stored, _ = read_tensors(data)
    shapes = Counter(f"{x.dtype} {list(x.shape)}" for name, x in stored.items() if name != "input_ids")
    lines = [f"arrays of an exported model, {len(data):,} bytes"]
    lines += [f"{count} of {text}" for text, count in shapes.items()]
    return [*lines, f"tokens: {'input_ids' if 'input_ids' in stored else 'not in the file'}"]


def _of_llama(state: LlamaState, nbytes: int) -> list[str]:
    what = {"state": "state of a sequence", "sequence": "file of a sequence", "context": "file of a context"}
    named = f", architecture {state.architecture}" if state.architecture else ""
    lines = [f"llama.cpp, {what[state.form]}{named}, {nbytes:,} bytes"]
    for cache in state.caches:
        first, last = int(cache.positions.min()), int(cache.positions.max())
        lines.append(
            f"cache of {len(cache.keys)} layers, {len(cache.positions):,} cells, positions {first:,} to "
            f"{last:,}"
        )
        lines.append(f"  keys: {_rows(cache.keys)}")
        lines.append(f"  values: {_values(cache)}")
    lines.append(f"tokens: {f'{len(state.tokens):,}' if state.tokens else 'not in the file'}")
    has_codes = any(x.type.dtype is None for cache in state.caches for x in (*cache.keys, *cache.values))
    said = [x.rotations for x in state.caches if x.rotations is not None]
    if said and has_codes:
        lines.append(
            f"codes: rotated by {said[0][0]} and {said[0][1]}" if any(said[0]) else "codes: not rotated"
        )
    rotation = ["whether codes are rotated"] if has_codes and not said else []
    return [*lines, f"not in the file: {', '.join(['heads', 'order of pairs', *rotation])}"]


def _values(cache: StoredCache) -> str:
    if not cache.values:
        return "none, so keys are latents with rope keys"
    transposed = ", transposed (no flash attention)" if cache.v_trans else ""
    return f"{_rows(cache.values)}{transposed}"


def _rows(rows: tuple[StoredRows, ...]) -> str:
    kinds = [(x.type.name, x.row_elements) for x in rows]
    return ", ".join(f"{len([*x])} of {kind} with {n:,} elements" for (kind, n), x in groupby(kinds))


def _of_mlx(data: Source) -> list[str]:
    cache = read_mlx(data)
    _, metadata = read_tensors(bytes_of("source", data))
    version = "0.28.4" if metadata["2.0"] else "0.32.2"
    lines = [f"mlx-lm, prompt cache as of {version}, {len(bytes_of('source', data)):,} bytes"]
    lines.append(f"{len(cache.layers)} layers, {cache.num_tokens:,} tokens")
    for layer, number in Counter(
        (x.keys.kind, x.keys.heads, x.keys.head_dim, x.window) for x in cache.layers
    ).items():
        kind, heads, dim, window = layer
        seen = "all tokens" if window is None else f"a window of {window}"
        lines.append(f"  {number} of {kind}, {heads} heads of {dim}, {seen}")
    lines += [f"says {name}: {text}" for name, text in cache.said]
    return [*lines, f"tokens: {'in the file' if cache.tokens else 'not in the file'}"]
