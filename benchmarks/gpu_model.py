"""A whole model on a GPU: decode steps, steps in a CUDA graph, and sessions, each beside transformers' own.

Llama-3-8B's geometry with random weights in bfloat16, made on the device. Caches are filled with random
keys and values, as a prompt leaves them. Each row has the milliseconds of one step, or of one new token of a
session, and ``ratio``, that by the stock row of the same sizes: DynamicCache with sdpa, StaticCache in a
graph, ``generate_batch``. ``peak`` is the most bytes alive beside the weights while a cache is filled and
steps are taken, by what DynamicCache's keys and values take. Steps in a graph are of 8 layers, which compile
in less time.

All parts take at most ``--seconds``, in the order of the rows; what has no time or memory says so. Writes
``gpu_results.json`` and the page, and prints one JSON line. ``--quick`` is a tiny model on any device, whose
figures are not kept.
"""

import argparse
import datetime
import gc
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from gpu import save
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache

from kvloom.integrations.transformers import KVCache, continuous_batching
from kvloom.integrations.transformers.models.cache_argument import as_argument

HERE = Path(__file__).parent
NAME = "Llama-3-8B"
STOCK = {
    "step": "DynamicCache",
    "graph": "StaticCache",
    "shared": "generate_batch",
    "apart": "generate_batch",
}
KINDS = {"step": ("auto", "int8", "int4"), "graph": ("auto", "int8"), "shared": ("auto",), "apart": ("auto",)}
WARMUP, STEPS = 3, 9
PAGE, PREFIX, NEW = 16, 512, 32


class Sizes(NamedTuple):
    """Geometry of a model, and what is measured with it.

    Attributes:
        config: Arguments of ``LlamaConfig``.
        graph_layers: Number of layers whose steps are in a graph.
        batches: Rows of a step.
        contexts: Tokens before a step.
        requests: Requests of a session.
        backend: What compiles a step.
    """

    config: dict[str, Any]
    graph_layers: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    requests: tuple[int, ...]
    backend: dict[str, Any]


LARGE = Sizes(
    {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 65536,
        "rope_theta": 500000.0,
    },
    8, (1, 8, 64), (2048, 32768), (64, 256), {"mode": "reduce-overhead"},
)  # fmt: skip
TINY = Sizes(
    {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    2, (1, 2), (32,), (3,), {"backend": "eager"},
)  # fmt: skip


class NoRoom(Exception):
    """A figure was not taken, and why."""


class Bench:
    """A device, a clock that runs out, and the rows that were measured.

    Args:
        device: Where the model is.
        sizes: Of the model.
        seconds: Time for all parts.
    """

    def __init__(self, device: str, sizes: Sizes, seconds: float) -> None:
        self.device, self.sizes, self.end = torch.device(device), sizes, time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []

    def model(self, num_layers: int) -> Any:
        """A model with random weights."""
        torch.manual_seed(0)
        config = LlamaConfig(**self.sizes.config | {"num_hidden_layers": num_layers, "bos_token_id": None})
        with self.device:
            made = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        made.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        return made

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def row(
        self, what: str, kind: str, batch: int, context: int, measure: Callable[[], dict[str, Any]]
    ) -> None:
        """A row, or why there is none."""
        row: dict[str, Any] = {
            "what": what, "model": NAME, "kind": kind, "batch": batch, "context": context
        }  # fmt: skip
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            if time.monotonic() > self.end:
                raise NoRoom("no time was left")
            row |= measure()
        except (NoRoom, torch.OutOfMemoryError, MemoryError) as error:
            row["why_not"] = str(error).splitlines()[0][:120]
        stock = [x for x in self.rows if x["kind"] == STOCK[what] and _sizes(x) == _sizes(row)]
        if stock and "ms" in row and "ms" in stock[0]:
            row["ratio"] = round(row["ms"] / stock[0]["ms"], 3)
        self.rows.append(row)
        print(f"{what} {kind} {batch} {context}: {row.get('ms', row.get('why_not'))}", file=sys.stderr)


def _sizes(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["what"], row["batch"], row["context"]


def fill(cache: Any, config: Any, rows: int, num_tokens: int, device: torch.device) -> None:
    """Store random keys and values in every layer."""
    shape = (rows, config.num_key_value_heads, num_tokens, config.head_dim)
    for layer in range(config.num_hidden_layers):
        key, value = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        cache.update(key, value, layer)


def cache_bytes(config: Any, tokens: int) -> int:
    """Bytes of bfloat16 keys and values."""
    return int(4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens)


def steps(bench: Bench, model: Any, kind: str, rows: int, context: int) -> dict[str, Any]:
    """Eager steps, and the most memory meanwhile."""
    whole, before = cache_bytes(model.config, rows * context), 0
    is_cuda = bench.device.type == "cuda"
    if is_cuda:
        before = torch.cuda.memory_allocated()
        if whole * 1.2 > torch.cuda.mem_get_info()[0]:
            raise NoRoom("DynamicCache's keys and values have no room")
    is_stock = kind == STOCK["step"]
    model.set_attn_implementation("sdpa" if is_stock else "kvloom")
    cache = DynamicCache(config=model.config) if is_stock else KVCache.for_model(model, kind)
    fill(cache, model.config, rows, context, bench.device)
    tokens = torch.full((rows, 1), 3, device=bench.device)
    given = as_argument(model, cache)
    found = {"ms": timed(bench, lambda: model(tokens, use_cache=True, logits_to_keep=1, **given))}
    if is_cuda:
        found["peak"] = round((torch.cuda.max_memory_allocated() - before) / whole, 3)
    return found


def timed(bench: Bench, step: Callable[[], object]) -> float:
    """Median milliseconds of a step, with what the host does."""
    took = []
    for i in range(WARMUP + STEPS):
        bench.wait()
        start = time.perf_counter()
        step()
        bench.wait()
        if i >= WARMUP:
            took.append((time.perf_counter() - start) * 1e3)
    return round(median(took), 3)


def graphs(bench: Bench, model: Any, kind: str, rows: int, context: int) -> dict[str, Any]:
    """Compiled steps of a cache of fixed size, on the device's own clock of steps in a graph."""
    is_stock, most = kind == STOCK["graph"], context + 64
    model.set_attn_implementation("sdpa" if is_stock else "kvloom")
    if is_stock:
        cache: Any = StaticCache(config=model.config, max_cache_len=most)
    else:
        cache = KVCache.for_model(model, kind, max_tokens=most, static=True)
    fill(cache, model.config, rows, context, bench.device)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False, **bench.sizes.backend)
    tokens = torch.full((rows, 1), 3, device=bench.device)
    position = torch.full((rows, 1), context, device=bench.device)
    given = as_argument(model, cache)

    def step() -> None:
        forward(input_ids=tokens, position_ids=position, use_cache=True, **given)

    return {"ms": timed(bench, step)}


def sessions(workload: str, bench: Bench, model: Any, kind: str, count: int, context: int) -> dict[str, Any]:
    """Milliseconds of a new token of a session of many requests, with all of its prompts."""
    draw, most = random.Random(1), PREFIX if bench.sizes is LARGE else 40
    new = NEW if bench.sizes is LARGE else 3

    def tokens(number: int) -> list[int]:
        return draw.choices(range(10, model.config.vocab_size), k=number)

    prefix = tokens(most) if workload == "shared" else []
    prompts = [
        prefix + tokens(draw.randrange(8, 32) if prefix else draw.randrange(8, most)) for _ in range(count)
    ]
    is_stock = kind == STOCK[workload]
    model.set_attn_implementation("sdpa")
    continuous_batching(model, None if is_stock else kind)
    config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    try:
        for _ in range(2):  # the first compiles kernels
            bench.wait()
            start = time.perf_counter()
            out = model.generate_batch(prompts, config, progress_bar=False)
            bench.wait()
            took = time.perf_counter() - start
            if time.monotonic() > bench.end:
                break
    finally:
        continuous_batching(model, None)
    if [len(x.generated_tokens) for x in out.values()] != [new] * count:
        raise RuntimeError("a request has not all its tokens")
    return {"ms": round(took * 1e3 / (new * count), 4)}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "step": steps,
    "shared": partial(sessions, "shared"),
    "apart": partial(sessions, "apart"),
    "graph": graphs,
}
"""What measures a row of each part, in the order of parts."""


def measure(bench: Bench, parts: Sequence[str]) -> None:
    """All rows of some parts, those of eager steps first."""
    sizes = bench.sizes
    model = bench.model(sizes.config["num_hidden_layers"])
    for part in parts:
        batches = {"step": sizes.batches, "graph": (1,)}.get(part, sizes.requests)
        if part == "graph":
            model = None
            model = bench.model(sizes.graph_layers)
        for context in sizes.contexts if part in ("step", "graph") else (0,):
            for rows in batches:
                for kind in (STOCK[part], *KINDS[part]):
                    bench.row(
                        part, kind, rows, context, partial(MEASURES[part], bench, model, kind, rows, context)
                    )


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {[*MEASURES]}; all, if none is named")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--seconds", type=float, default=200, help="time for all parts")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of gpu_results.json")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(MEASURES):
        parser.error(f"expected parts, some of {[*MEASURES]}, got {sorted(unknown)}")
    logging.disable(logging.WARNING)
    if not args.quick and not torch.cuda.is_available():
        sys.exit("gpu_model measures a model on a CUDA device, and there is none: no figure was taken")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench = Bench(device, TINY if args.quick else LARGE, args.seconds)
    with torch.no_grad():
        measure(bench, [x for x in MEASURES if not args.parts or x in args.parts])
    result = {
        "figure": "gpu_model",
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "checks": {},
        "rows": bench.rows,
    }
    if not args.quick:
        save(result, args.out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
