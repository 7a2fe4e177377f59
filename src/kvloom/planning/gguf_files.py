"""Configurations of GGUF files: their header says what the model is, and its weights are not read.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the fields of the header.
"""

from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import summary_of

_UNQUANTIZED: Final = {0: "float32", 1: "float16", 32: "bfloat16"}
"""Dtypes by ``general.file_type``; a model of other files computes in bfloat16, as other quantized ones."""
_SAID: Final = {"attention.sliding_window": "sliding_window", "attention.key_length": "head_dim"}
"""Fields of a header that transformers takes for some architectures only, as configurations call them."""
_FULL: Final = "global_head_dim"
"""Of configurations whose layers with and without a window have other heads, which transformers reads."""


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or that a folder without a config.json has, the first of its parts.

    Raises:
        ArgumentError: the folder has several models.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = {parts_of(x)[0] for x in path.glob("*.gguf")}
    if len(found) > 1:
        names = ", ".join(sorted(x.name for x in found))
        raise ArgumentError(f"model must be one of the GGUF files of {str(path)!r}, got {names:.300}")
    return next(iter(found), None)


def parts_of(path: Path) -> list[Path]:
    """All files of a model whose file is named ``NAME-00001-of-00003.gguf``; of others the file alone."""
    name, _, count = path.stem.rpartition("-of-")
    if not (count.isdigit() and name[-5:].isdigit()):
        return [path]
    return sorted(path.parent.glob(f"{name[:-5]}?????-of-{count}.gguf"))


def read_gguf(path: Path) -> Any:
    """Configuration of the model in a GGUF file, with the bytes of all its tensors.

    They are in its ``quantization_config``, as ``nbytes`` of the method ``gguf``.

    Raises:
        ArgumentError: the file is damaged.
        UnsupportedError: its architecture is none that transformers reads.
        ModuleNotFoundError: gguf is not installed.
    """
    import gguf

    parts = parts_of(path)
    try:
        readers = [gguf.GGUFReader(part) for part in parts]
        name = readers[0].fields["general.architecture"].contents()
    except (ValueError, KeyError, OSError, IndexError) as error:
        raise ArgumentError(
            f"model must be a GGUF file with a whole header, got {str(path)!r}: {summary_of(error)}"
        ) from error
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=parts[0].name, local_files_only=True)
    except Exception as error:  # transformers may raise anything for an architecture that it does not read
        raise UnsupportedError(
            f"model must be a GGUF file whose architecture transformers reads, got {name!r}: "
            f"{summary_of(error)}; plan it by the config.json of the model, with its weights as bytes"
        ) from error
    for said, field in _SAID.items():
        found = readers[0].fields.get(f"{name}.{said}")
        if found is not None and hasattr(config, field) and not hasattr(config, _FULL):
            setattr(config, field, int(found.contents()))
    kind = readers[0].fields.get("general.file_type")
    config.dtype = _UNQUANTIZED.get(int(kind.contents()) if kind is not None else -1, "bfloat16")
    nbytes = sum(int(tensor.n_bytes) for reader in readers for tensor in reader.tensors)
    config.quantization_config = {"quant_method": "gguf", "nbytes": nbytes}
    return config
