"""Gains of changes of a 4-bit format, one at a time, and 4 bits of other libraries. Prints one JSON line.

Formats are simulated in plain torch: a DynamicCache whose tokens are rounded as the format would round them,
measured by ``kvloom.quality``. The first is int4 as kvloom's kernels quantize it, and has the figures of
``PLAIN``. After them come unchanged caches: kvloom's by format strings and by a plan of bits from another
text, quanto and hqq in transformers' cache, which leave the last 128 tokens unquantized, or the last one, and
llama.cpp's q4_0 by its own codec, of keys and values that a Hadamard matrix rotates as llama.cpp does.

Outliers are made: two RoPE pairs of each key head, ten times as large in keys and a tenth in queries, so
that the exact model is the same; 30 times in the first and the last layer. Qwen2.5-7B has key biases of a
norm of 605 and 921 there and of about 22 between (github.com/ggml-org/llama.cpp/issues/21385), and KIVI
(arXiv 2402.02750) shows such channels in Llama-2.
"""

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peers import RESIDUAL, Contender, installed, quantized
from torch import Tensor
from transformers import DynamicCache

from kvloom.caches.format import num_exact
from kvloom.core.entries import CODES, Entry, SideFormat
from kvloom.integrations.transformers import KVCache, load_model
from kvloom.measuring.planned_bits import plan_bits
from kvloom.measuring.quality import LONG, ROWS, WINDOW, Peer, Quality, quality, windows_of
from kvloom.models import bundled_model_path, iter_texts
from kvloom.quant.affine import dequantize, quantize

OUTLIER, OUTLIER_AT_THE_ENDS = 10.0, 30.0
PLAIN, ROTATED = "int4,rotate=none,recent=0,smooth=none", "int4,recent=0,smooth=none"
STORED = (
    "int8", "int8,rotate=keys", "int4", "int4,recent=32", "int4,recent=128", "int4:g32", "int4:g16",
    PLAIN, ROTATED, "int4,recent=0", "int4,rotate=values,recent=0", "int4,rotate=both,recent=0",
    "int4:g32,rotate=none,recent=0", "int4:g32,recent=0", "int4:g32,rotate=both,recent=0",
    "int4:g16,rotate=none,recent=0", "int4:g16,recent=0", "int4:g16,rotate=both,recent=0",
)  # fmt: skip
PLANNED = 1000
"""Bytes of a token that a plan of bits may take, with the share of its residual window in ``LONG``."""
PEERS = (("quanto", RESIDUAL), ("quanto", 1), ("hqq", RESIDUAL), ("hqq", 1))
CHUNK = 32


def largest(groups: Tensor) -> Tensor:
    """The element of largest magnitude is -8 scales, codes are from -8 to 7."""
    codes = quantize(groups, 4, groups.shape[-1], torch.float16, full_range=True)
    return dequantize(*codes, 4, groups.dtype)


def all_levels(groups: Tensor) -> Tensor:
    """Codes from -8 to 7; the number of the largest magnitude is -8 times the scale, which has a sign."""
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    return coded(groups, torch.where(-low >= high, low, high) / -8)


def refined(groups: Tensor) -> Tensor:
    """``all_levels``, and then the scale with which these codes come nearest."""
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    return coded(groups, torch.where(-low >= high, low, high) / -8, refine=True)


def positive(groups: Tensor) -> Tensor:
    """The smallest scale that puts no number more than half a code beyond -8 and 7; then as ``refined``."""
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    return coded(groups, torch.maximum(high / 7.5, low / -8.5), refine=True)


def q4_0(groups: Tensor) -> Tensor:
    """llama.cpp's q4_0, groups of 32, by its own codec."""
    from gguf import GGMLQuantizationType, quants

    codes = quants.quantize(groups.contiguous().numpy(), GGMLQuantizationType.Q4_0)
    return torch.from_numpy(quants.dequantize(codes, GGMLQuantizationType.Q4_0)).view_as(groups)


def zero_point(groups: Tensor) -> Tensor:
    """16 levels from the smallest number to the largest; scale and smallest number are float16."""
    low = groups.amin(-1, keepdim=True).half().float()
    step = ((groups.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-8)
    return ((groups - low) / step).round().clamp(0, 15) * step.half().float() + low


def coded(groups: Tensor, scale: Tensor, *, refine: bool = False) -> Tensor:
    """Numbers that 16 codes times a float16 scale give."""
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (groups / scale).round().clamp(-8, 7)
    if refine:
        scale = (groups * codes).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True).clamp_min(1)
    return codes * scale.half().float()


def hadamard(x: Tensor) -> Tensor:
    """``x`` times the Hadamard matrix of its last axis, a power of two; it is its own inverse."""
    width = x.shape[-1]
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return x @ (matrix / width**0.5)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of 4 bits.

    Attributes:
        name: The change.
        rule: Rounds groups ``[..., group]``.
        group: Elements that share a scale.
        rotates: Keys, values or both (``"kv"``) are rotated before they are rounded, and unrotated.
        zeros: Sides, ``"k"`` or ``"v"``, whose rule is ``zero_point``.
        recent: Length of the residual window.
    """

    name: str
    rule: Callable[[Tensor], Tensor] = largest
    group: int = 64
    rotates: str = ""
    zeros: str = ""
    recent: int = 0

    def rounded(self, x: Tensor, side: str) -> Tensor:
        """``[B, H, N, D]`` as the format returns them."""
        rule = zero_point if side in self.zeros else self.rule
        turned = hadamard(x) if side in self.rotates else x
        back = rule(turned.unflatten(-1, (-1, self.group))).flatten(-2)
        return hadamard(back) if side in self.rotates else back

    def nbytes_per_token(self, config: Any) -> float:
        """Bytes of a token in codes, in all layers."""
        groups, heads = config.head_dim / self.group, config.num_hidden_layers * config.num_key_value_heads
        sides = (config.head_dim / 2 + groups * (4 if side in self.zeros else 2) for side in "kv")
        return heads * sum(sides)

    def cache(self, model: Any) -> DynamicCache:
        """An empty one."""
        cache = RoundedCache(config=model.config)
        cache.format = self
        return cache


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """A cache that returns its tokens as a format would round them."""

    format: Format

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As ``DynamicCache``."""
        exact = super().update(key, value, layer, *args, **kwargs)
        kept = max(0, exact[0].shape[2] - self.format.recent)
        key, value = (
            torch.cat((self.format.rounded(x[:, :, :kept], side), x[:, :, kept:]), dim=2)
            for side, x in zip("kv", exact, strict=True)
        )
        return key, value


FORMATS = (
    Format("as int4"),
    Format("groups of 32", group=32),
    Format("groups of 16", group=16),
    Format("rotated keys", rotates="k"),
    Format("rotated values", rotates="v"),
    Format("zero points of keys", zeros="k"),
    Format("zero points of values", zeros="v"),
    Format("16 levels", all_levels),
    Format("16 levels, refined", refined),
    Format("16 levels, refined, positive scales", positive),
    Format("the same, rotated keys", positive, rotates="k"),
    Format("the same, newest 32 exact", positive, rotates="k", recent=32),
    Format("the same, newest 64 exact", positive, rotates="k", recent=64),
)
QUICK = ("as int4", "groups of 16", "rotated keys", "the same, newest 64 exact")
LLAMA_CPP = Format("llama.cpp q4_0, Hadamard", q4_0, group=32, rotates="kv")


@torch.no_grad()
def with_outliers(model: Any) -> Any:
    """A copy with two RoPE pairs of each key head that are larger, and the same predictions."""
    model = deepcopy(model)
    config, generator = model.config, torch.Generator().manual_seed(1)
    layers = model.model.layers
    for layer in layers:
        outlier = OUTLIER_AT_THE_ENDS if layer in (layers[0], layers[-1]) else OUTLIER
        scale = torch.ones(config.num_key_value_heads, config.head_dim)
        for head in scale:
            pairs = torch.randperm(config.head_dim // 2, generator=generator)[:2]
            head[pairs] = head[pairs + config.head_dim // 2] = outlier
        queries = scale.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0)
        layer.self_attn.k_proj.weight *= scale.view(-1, 1)
        layer.self_attn.q_proj.weight /= queries.view(-1, 1)
    return model


def contenders(model: Any) -> tuple[dict[str, Peer], list[str]]:
    """Caches of others by their names, and why some are left out."""
    wanted = {
        f"{backend} int4, raw {residual}": (quantized(backend, 4, residual=residual), min(residual, CHUNK))
        for backend, residual in PEERS
    }
    found, missing = installed([contender for contender, _ in wanted.values()], model)

    def peer(name: str, contender: Contender, chunk: int) -> Peer:
        return Peer(name, lambda model: contender.make(model, ROWS * WINDOW), chunk)

    peers = {name: peer(name, *each) for name, each in wanted.items() if each[0] in found}
    try:
        import gguf  # noqa: F401
    except ImportError:
        return peers, [*missing, f"{LLAMA_CPP.name}: gguf is not installed"]
    return peers | {LLAMA_CPP.name: Peer(LLAMA_CPP.name, LLAMA_CPP.cache)}, missing


def planned(model: Any, tokenizer: Any, num_tokens: int, path: Path) -> Peer:
    """A cache by a plan of bits for the model, made on text that it is not measured on."""
    config = model.config
    side = SideFormat(config.head_dim, "float32")
    entry = Entry(config.num_hidden_layers * config.num_key_value_heads, side, side)
    of_newest = entry.nbytes * (num_exact(CODES["int4"].recent) + 1) / LONG
    text = windows_of(tokenizer, iter_texts("train"), num_tokens)
    plan_bits(model, text, budget=PLANNED - of_newest).save(path)
    return Peer(f"planned, {PLANNED:,} bytes", lambda model: KVCache.for_model(model, path))


def mean_error(row: Quality) -> float:
    """Root of the mean square of the errors of attention's output, over layers and heads."""
    errors = [error for heads in row.head_errors.values() for error in heads]
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="a piece of a window and few formats, to see that it runs"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    plain, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    windows = windows_of(tokenizer, iter_texts("heldout"), args.windows * WINDOW)
    windows = windows[:1, :64] if args.quick else windows
    formats = [x for x in FORMATS if not args.quick or x.name in QUICK]
    simulated = [Peer(x.name, x.cache) for x in formats]
    theirs, missing = ({}, []) if args.quick else contenders(plain)
    kinds = [*simulated, *((PLAIN, ROTATED) if args.quick else STORED), *theirs.values()]
    changed = with_outliers(plain)
    with TemporaryDirectory() as folder:
        plans = [
            planned(x, tokenizer, 64 if args.quick else 2 * WINDOW, Path(folder) / f"{i}.json")
            for i, x in enumerate((plain, changed))
        ]
        exact, *measured = quality(plain, windows, [*kinds, plans[0]])
        outliers = quality(changed, windows, [*kinds, plans[1]])[1:]
    int4 = next(row for row in measured if row.kind == PLAIN)
    rows = [
        {
            "format": format.name,
            "recent": format.recent,
            "nbytes_per_token": format.nbytes_per_token(plain.config),
            "mean_kl": a.mean_kl,
            "agreed": a.agreed,
            "worst_head": a.worst_head[2],
            "mean_kl_outliers": b.mean_kl,
        }
        for format, a, b in zip(formats, measured, outliers, strict=False)
    ]
    stored = [
        {
            "cache": a.kind,
            "nbytes_per_token": (
                LLAMA_CPP.nbytes_per_token(plain.config) if a.kind == LLAMA_CPP.name else a.nbytes_per_token
            ),
            "perplexity": a.perplexity / exact.perplexity - 1,
            "mean_kl": a.mean_kl,
            "agreed": a.agreed,
            "error": mean_error(a),
            "mean_kl_outliers": b.mean_kl,
            "error_outliers": mean_error(b),
        }
        for a, b in zip(measured[len(formats) :], outliers[len(formats) :], strict=True)
    ]
    line = {"figure": "formats", "tokens": int4.num_tokens, "int4": int4.mean_kl, "rows": rows}
    line |= {"stored": stored, "missing": missing}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
