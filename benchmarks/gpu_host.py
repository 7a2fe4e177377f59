"""What the host does in a decode step on a GPU, measured without one: all but the launches themselves.

A step of a small model on a GPU waits for Python, and so does one of a large model with few rows. Here the
model has 16 narrow layers on the CPU, and kernels are compiled and looked up but not launched. ``step`` is
the time of a step by that of transformers' DynamicCache with sdpa. ``store`` and ``attend`` are microseconds
of one layer, those of stock of its update and of sdpa. A launch on a GPU takes about 4 more, also in stock.

Prints one JSON line. It needs Triton and no device.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.no_device import LAUNCHED, install

from kvloom import KVCache

LAYERS, CONTEXT, ROUNDS, STEPS = 16, 40, 7, 24
KINDS = {"DynamicCache": "sdpa", "auto": "kvloom", "int8": "kvloom", "int4": "kvloom"}


class Watch:
    """Time of each call of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.times = function, list[float]()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = self.function(*arguments, **options)
        self.times.append(time.perf_counter() - start)
        return found


def measure(model: Any, kind: str, steps: int) -> dict[str, float]:
    """Microseconds of a layer: of a whole step, of attention and of updates, and launches of a step."""
    model.set_attn_implementation(KINDS[kind])
    token, found = torch.full((1, 1), 7), list[dict[str, float]]()
    attend = Watch(ALL_ATTENTION_FUNCTIONS[KINDS[kind]])
    ALL_ATTENTION_FUNCTIONS[KINDS[kind]] = attend
    try:
        is_stock = kind == "DynamicCache"
        cache = DynamicCache(config=model.config) if is_stock else KVCache.for_model(model, kv=kind)
        model(token.expand(1, CONTEXT), past_key_values=cache, use_cache=True)
        update = Watch(cache.update)
        cache.update = update
        for _ in range(steps):
            for times in (attend.times, update.times, LAUNCHED):
                times.clear()
            start = time.perf_counter()
            model(token, past_key_values=cache, use_cache=True)
            whole = (time.perf_counter() - start) / LAYERS
            own = {"step": whole, "attend": median(attend.times), "store": median(update.times)}
            found.append({name: 1e6 * x for name, x in own.items()} | {"launches": len(LAUNCHED)})
    finally:
        ALL_ATTENTION_FUNCTIONS[KINDS[kind]] = attend.function
    return {name: median(x[name] for x in found[steps // 2 :]) for name in found[0]}


def main() -> None:
    """Measure all kinds in turn."""
    warnings.simplefilter("ignore")
    rounds, steps = (1, 4) if "--quick" in sys.argv[1:] else (ROUNDS, STEPS)
    install()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with torch.no_grad():
        for _ in range(rounds):
            for kind, own in found.items():
                own.append(measure(model, kind, steps))
    stock = [x["step"] for x in found["DynamicCache"]]
    rows = {}
    for kind, own in found.items():
        rows[kind] = {name: round(median(x[name] for x in own), 1) for name in own[0]}
        rows[kind]["step"] = round(median(x["step"] / y for x, y in zip(own, stock, strict=True)), 2)
    print(json.dumps({"figure": "gpu_host", "layer_us": round(median(stock), 1), "rows": rows}))


if __name__ == "__main__":
    main()
