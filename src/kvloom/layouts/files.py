"""Conversion of safetensors files."""

import os
from collections.abc import Callable
from pathlib import Path

from kvloom.errors import ArgumentError
from kvloom.layouts.catalog import NamedLayout, find_layout
from kvloom.layouts.conversion import Placement, allocate, copy_all
from kvloom.layouts.tensors import KVTensors


def convert_file(
    source: Path,
    target: Path,
    source_layout: NamedLayout | str,
    placement: Placement,
    heads: int | None = None,
    observe: Callable[[int], None] = lambda num_layers: None,
) -> KVTensors:
    """Convert a file of tensors, named as in ``KVTensors``, to another layout.

    Args:
        source: The file to read, memory-mapped; no more than a part of it is in memory at a time.
        target: The file to write; it is visible only when complete.
        source_layout: A name of ``LAYOUTS``, or axes.
        placement: Layout, page size and shards of the target.
        heads: Heads of all shards, if ``source_layout`` merges H with D; ``None`` for the file's metadata, as
            this function writes it.
        observe: Called after each layer, with the number of layers so far.

        Returns: The tensors that were written.

    Raises:
        ArgumentError: ``source`` is damaged, or the target cannot hold it without loss, or be written.
        OSError: a file cannot be read or replaced.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    layout = find_layout("source_layout", source_layout)
    with source.open("rb"):
        pass  # the system's message
    try:
        with safe_open(source, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ArgumentError(f"source must be a safetensors file, got {str(source)!r}: {error}") from error
    if heads is None and metadata.get("heads", "").isdecimal():
        heads = int(metadata["heads"])
    read = KVTensors(tensors, layout, heads)
    converted = allocate(read, placement)
    copy_all(
        read, converted, gives_back=True, observe=observe
    )  # else all of the source stays in memory beside the target
    del tensors, read
    said = {"layout": find_layout("layout", converted.layout).axes, "heads": str(converted.heads)}
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        save_file(dict(converted.tensors), unfinished, metadata=said)
        unfinished.replace(target)
    except SafetensorError as error:
        raise ArgumentError(f"target must be a file that can be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return converted
