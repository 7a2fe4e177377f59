"""Bytes of quantized weights, by the section ``quantization_config`` of a configuration.

The section says how many bits a weight has, which weights share a scale, and which modules stay as they are.
No package of the method and no device is needed: a plan may be for another machine.

Source: https://huggingface.co/docs/transformers/main_classes/quantization for the fields; shapes of scales
and zero points as the checkpoints of each method have them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from math import ceil, prod
from typing import Any, Final, TypeAlias

from torch import nn
from transformers.pytorch_utils import Conv1D

from kvloom.errors import UnsupportedError

Section: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[int, int, int], int]
"""Bytes of a matrix and what is beside it, from its outputs, its inputs, and bytes of the model's dtype."""

_WORD: Final = 32
"""Bits of the integers that several codes are packed into."""
_BLOCK: Final = 64
"""Weights that share a scale in bitsandbytes, with 4 bits."""
_NESTED: Final = 256
"""Scales that share a scale of their own, with ``bnb_4bit_use_double_quant``."""
_SKIPPED: Final = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")
"""Fields with the names of modules that stay as they are."""


def bytes_by_section(model: Any, section: Section) -> int:
    """Bytes of the parameters and buffers of a model whose section says how its weights are quantized.

    Args:
        model: The model without quantized weights, which may be on the meta device.
        section: ``quantization_config`` of its configuration.

    Raises:
        UnsupportedError: the method is none whose bytes are known.
    """
    if section.get("quant_method") == "gguf":
        return int(section["nbytes"])  # of the file itself
    method = method_of(section)
    total: int = sum(x.nbytes for x in model.buffers())
    seen = set[int]()
    for name, module in model.named_modules():
        for field, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_matrix = parameter.ndim == 3 or (parameter.ndim == 2 and field == "weight")
            rule = _rule_of(method, section, model, name, module) if is_matrix else None
            if rule is None:
                total += parameter.nbytes
                continue
            out, width = parameter.shape[-2:]
            if isinstance(module, Conv1D):
                out, width = width, out
            total += prod(parameter.shape[:-2]) * rule(out, width, parameter.itemsize)
    return total


def method_of(section: Section) -> str:
    """Name of the method of a section.

    Raises:
        UnsupportedError: the method is none whose bytes are known.
    """
    method = section.get("quant_method")
    if method is None:
        method = "mlx" if "group_size" in section else "bitsandbytes"
    method = str(getattr(method, "value", method))
    if method not in _RULES:
        raise UnsupportedError(
            f"config must have weights that are quantized by one of {', '.join(_RULES)}, got quant_method "
            f"{method!r}: give weights, the bytes of its files"
        )
    return method


def _rule_of(method: str, section: Section, model: Any, name: str, module: nn.Module) -> Rule | None:
    """How a module's matrices are kept; ``None`` as the others."""
    is_linear = isinstance(module, (nn.Linear, Conv1D))
    is_experts = not is_linear and any(x.ndim == 3 for x in module.parameters(recurse=False))
    is_embedding = isinstance(module, nn.Embedding) and method == "mlx"
    is_head = module is model.get_output_embeddings()
    takes_head = method in ("compressed-tensors", "mlx") or (method == "gptq" and section.get("lm_head"))
    if (
        not (is_linear or is_experts or is_embedding)
        or (is_head and not takes_head)
        or (method == "mxfp4" and not is_experts)
        or (method in ("awq", "gptq") and not (is_head or _is_within(model, module)))
        or any(_is_named(name, x) for field in _SKIPPED for x in section.get(field) or ())
    ):
        return None
    if method == "mlx" and (own := section.get(name)) is not None:  # True is as the others
        return None if own is False else _RULES[method](section if own is True else {**section, **own})
    if method != "compressed-tensors":
        return _RULES[method](section)
    for group in (section.get("config_groups") or {}).values():
        targets = group.get("targets") or ()
        if group.get("weights") and any(x == "Linear" or _is_named(name, x) for x in targets):
            return _RULES[method](
                {**group["weights"], "format": group.get("format") or section.get("format")}
            )
    return None


def _is_within(model: Any, module: nn.Module) -> bool:
    """Whether a module is one of the part that generates text."""
    decoder = model.get_decoder()
    return any(x is module for x in (model if decoder is None else decoder).modules())


def _is_named(name: str, pattern: str) -> bool:
    """Whether a pattern of a section means a module: a part of its name, or ``re:`` and an expression."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], part) for part in _ends(name))
    return re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '.*')}(\.|$)", name) is not None


def _ends(name: str) -> Iterator[str]:
    """A name, and what is left of it without its first parts: files have names without some of these."""
    parts = name.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))


def _fp8(section: Section) -> Rule:
    block = section.get("weight_block_size")
    scale = 1 if section.get("scale_fmt") == "ue8m0" else 4

    def rule(out: int, width: int, _: int) -> int:
        scales = 1 if block is None else ceil(out / block[0]) * ceil(width / block[1])
        return out * width + scale * scales + 4 * (section.get("activation_scheme") == "static")

    return rule


def _packed(section: Section) -> Rule:
    """Codes of GPTQ and AWQ in words, with a scale and a zero point for each group of inputs."""
    bits: int = section.get("bits", 4)
    has_order = str(section.get("quant_method")).endswith("gptq")

    def rule(out: int, width: int, _: int) -> int:
        size = section.get("group_size", 128)
        groups = 1 if size in (-1, None) else ceil(width / size)
        words = out * ceil(width * bits / _WORD) + groups * ceil(out * bits / _WORD)
        return 4 * words + 2 * groups * out + 4 * width * has_order

    return rule


def _bitsandbytes(section: Section) -> Rule:
    if section.get("load_in_8bit") or section.get("_load_in_8bit"):
        return lambda out, width, _: out * width + 4 * out

    def rule(out: int, width: int, _: int) -> int:
        scales = ceil(out * width / _BLOCK)
        nested = scales + 4 * ceil(scales / _NESTED) + 4 * _NESTED + 4
        beside = nested if section.get("bnb_4bit_use_double_quant") else 4 * scales
        return ceil(out * width / 2) + 4 * 16 + beside  # and a table of what the codes mean

    return rule


def _compressed(weights: Section) -> Rule:
    bits: int = weights["num_bits"]
    size, said = weights.get("group_size"), str(weights.get("format"))
    block = weights.get("block_structure") or (1, 1)
    is_packed, is_nvfp4 = "pack-quantized" in said, said.startswith("nvfp4")

    def rule(out: int, width: int, itemsize: int) -> int:
        codes = 4 * out * ceil(width * bits / _WORD) if is_packed else ceil(out * width * bits / 8)
        scales = {
            "tensor": 1,
            "channel": out,
            "block": ceil(out / block[0]) * ceil(width / block[1]),
        }.get(str(weights.get("strategy")), out * ceil(width / (size or width)))
        codes += scales * (1 if is_nvfp4 else itemsize) + 4 * is_nvfp4
        if not weights.get("symmetric", True):
            codes += 4 * ceil(out * bits / _WORD) * (scales // out) if is_packed else scales
        return codes + 16 * (is_packed and not is_nvfp4) + 4 * width * (weights.get("actorder") == "group")

    return rule


def _mlx(section: Section) -> Rule:
    bits: int = section.get("bits", 4)
    size: int = section.get("group_size", 64)
    is_affine = section.get("mode", "affine") == "affine"  # others have a scale of a byte, and no offset
    return lambda out, width, itemsize: (
        out * (4 * ceil(width * bits / _WORD) + (2 * itemsize if is_affine else 1) * ceil(width / size))
    )


_RULES: Final[Mapping[str, Callable[[Section], Rule]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: lambda out, width, itemsize: out * width + 4 * out,
    "mxfp4": lambda _: lambda out, width, itemsize: out * ceil(width / 2) + out * ceil(width / 32),
    "gptq": _packed,
    "awq": _packed,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "mlx": _mlx,
}
