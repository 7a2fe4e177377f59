"""Check of a model folder before loading: no pickles, no code, complete files, plausible sizes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvloom.errors import ArgumentError

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_embd",
    "n_layer",
    "n_head",
)
_LAYERS: Final = ("num_hidden_layers", "n_layer")


def check_model_folder(path: Path) -> None:
    """Check a local folder without torch and transformers, and without loading its model.

    Args:
        path: A folder with ``config.json`` and ``model.safetensors``, or the latter's parts and their index.

    Raises:
        ArgumentError: There is no such folder, a file is damaged, weights are pickled or only an adapter's,
            or the configuration names code or has a size that does not fit the weights.
    """
    if not (path / "config.json").is_file():
        raise ArgumentError(f"model must be a local folder with a config.json, got {str(path)!r}")
    if (path / "adapter_config.json").exists():
        raise ArgumentError(f"model must be whole, got an adapter's adapter_config.json in {str(path)!r}")
    config = _read_object(path / "config.json")
    if config.get("transformers_weights") is not None:  # it may name a pickle
        raise ArgumentError(
            f"model must name no transformers_weights in config.json, got {config['transformers_weights']!r}"
        )
    for name, value in _settings(config):
        if name.endswith("attn_implementation") and "/" in str(value):  # code of a hub
            raise ArgumentError(f"model must name no kernels of a hub in config.json, got {name} {value!r}")
    files = _weight_files(path)
    num_tensors = sum(_count_tensors(file) for file in files)
    most = 2 * sum(file.stat().st_size for file in files)  # elements: each takes at least half a byte
    for sizes in (config, config.get("text_config")):
        if isinstance(sizes, dict):
            _check_sizes(sizes, num_tensors, most)


def _settings(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every name and value, those of nested configurations included."""
    parts = [config]
    while parts:
        part = parts.pop()
        yield from part.items()
        parts += [value for value in part.values() if isinstance(value, dict)]


def _weight_files(path: Path) -> list[Path]:
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ArgumentError(
            f"model must have a {whole.name}, for pickles are never loaded, got none in {str(path)!r}"
        )
    places = _read_object(index).get("weight_map")
    names: list[Any] = list(places.values()) if isinstance(places, dict) else [places]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ArgumentError(f"model must name safetensors files in {index}, got {name!r}")
        if not (path / name).is_file():
            raise ArgumentError(f"model must have the files that {index} names, got no {name!r}")
    return [path / name for name in sorted(set(names))]


def _count_tensors(file: Path) -> int:
    """Number of tensors in a safetensors file; its header is checked against the file's size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as weights:
            return len(weights.keys())
    except (SafetensorError, OSError) as error:
        raise ArgumentError(f"model must have a whole {file.name}, got {str(file)!r}: {error}") from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"model must have JSON in {str(file)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ArgumentError(f"model must have a JSON object in {str(file)!r}, got {type(content).__name__}")
    return content


def _check_sizes(sizes: dict[str, Any], num_tensors: int, num_elements: int) -> None:
    """Check that the weights can have these sizes and layers, before a model of that size is allocated."""
    for name in _SIZES:
        size, most = sizes.get(name), num_tensors if name in _LAYERS else num_elements
        if isinstance(size, int) and not 1 <= size <= most:
            raise ArgumentError(
                f"model must have a {name} of 1 to {most} in config.json, for its weights are {num_tensors} "
                f"tensors of at most {num_elements} elements, got {size}"
            )
