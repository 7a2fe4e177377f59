"""A known prefix of 2,048 tokens: computed, found in memory, and read from local files by a new pool.

A Llama of random weights with 4 layers of 8 heads of 64, in float32 and in int8. ``computed`` is the time to
the first token with nothing known, and what follows is how many times sooner it comes. A new pool opens the
store, lists it, reads, verifies and copies into its pages; the files are in the page cache of the system, as
when one process follows another. ``verified`` is the time of reading the files, all of which are kept until
the last, as the store keeps them, by that of reading and verifying them, again and again in one process.
``writing`` is the time that writing in the background adds to the decode steps after a commit, and
``commit_ms`` what the commit itself takes: its pages are copied and summed before it returns. ``reads`` are
verified reads alone, of int8 pages of random bytes, of the same size and of 32 layers of 8 heads of 128,
which Llama 3 8B has.

Prediction: reading is memory speed, so codes, a quarter of the bytes, come sooner by more. XXH3 reads at
twice the speed at which the system copies a file, so verified reading is two thirds of reading. Memory that
is new to the process comes from the system page by page, which takes longer than both, so of 139 MB verifying
is little. The writer has the lowest priority and no step waits for it, but a decode step uses all processors,
so it costs what it computes.

Prints one JSON line.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash
from rounds import in_turn, ratio, seconds
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import KVPool
from kvloom.integrations.transformers.pool.identity import fingerprint_of
from kvloom.store import Fingerprint, KVStore, LayerFormat, SideFormat
from kvloom.store.below import RUN_BYTES, runs_of
from kvloom.store.format import page_bytes

KINDS = {"float32": "auto", "int8": "int8"}
VOCABULARY = 1000
PAGE = 16
GEOMETRIES = ((4, 8, 64), (32, 8, 128))
"""Layers, heads, head dim."""


def make_model(layers: int) -> Any:
    """Layers of 8 heads of 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192,
        attn_implementation="kvloom",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def text(length: int, seed: int) -> Tensor:
    """One row of tokens."""
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


class Contest:
    """One kind of cache.

    Args:
        model: Model that computes.
        kv: Format of its keys and values.
        folder: Folder of the store.
        length: Tokens of the prefix.
        steps: Number of decode steps after a commit.
    """

    def __init__(self, model: Any, kv: str, folder: Path, length: int, steps: int) -> None:
        self.model, self.kv, self.steps = model, kv, steps
        self.url = f"file://{folder}"
        self.tokens = text(length + 1, 1)
        self.num_texts = 1
        self.memory = self.pool(KVStore(self.url, read="always"))
        cache, _ = self.first_token(self.memory, self.tokens)
        self.memory.commit(cache, self.tokens)
        self.memory.close()
        self.files = [*folder.rglob("*.safetensors")]
        self.commits: list[float] = []

    def pool(self, store: KVStore | None = None) -> KVPool:
        """An empty one."""
        return KVPool.for_model(self.model, self.kv, max_tokens=4 * self.tokens.shape[1], store=store)

    @torch.no_grad()
    def first_token(self, pool: KVPool, tokens: Tensor) -> tuple[Any, int]:
        """The cache after the prompt, and the first new token."""
        cache = pool.begin(tokens)
        new = tokens[:, int(cache.get_seq_length()) :]
        return cache, int(self.model(new, cache=cache, logits_to_keep=1).logits[0, -1].argmax())

    def until_first_token(self, way: str) -> float:
        """Seconds."""
        if way == "memory":
            pool = self.memory
        else:
            pool = self.pool(KVStore(self.url, read="always") if way == "files" else None)
        return seconds(lambda _: self.first_token(pool, self.tokens), 0)

    @torch.no_grad()
    def step(self, is_writing: bool) -> float:
        """Seconds of a decode step, after a prompt that is not stored."""
        self.num_texts += 1
        tokens = text(self.tokens.shape[1], self.num_texts)
        with self.pool(KVStore(self.url)) as pool:
            cache, token = self.first_token(pool, tokens)
            if is_writing:
                self.commits.append(seconds(lambda _: pool.commit(cache, tokens), 0))
            began = time.perf_counter()
            for _ in range(self.steps):
                logits = self.model(torch.tensor([[token]]), cache=cache).logits
                token = int(logits[0, -1].argmax())
            return (time.perf_counter() - began) / self.steps


def time_reads(
    store: KVStore, whose: Fingerprint, ids: list[int], files: list[Path], rounds: int
) -> dict[str, list[float]]:
    """Seconds of reading the files, and of reading and verifying them."""

    def read() -> float:
        began = time.perf_counter()
        kept = []
        for path in files:
            with path.open("rb", buffering=0) as file:
                kept.append(file.read())
        return time.perf_counter() - began

    def verify() -> float:
        began = time.perf_counter()
        pieces = store.load(whose, "", ids)
        took = time.perf_counter() - began
        if pieces[-1].segment.end != len(ids):
            raise RuntimeError("the prefix was not read")
        return took

    return in_turn({"read": read, "verified": verify}, rounds, 2)


def measure_reads(geometry: tuple[int, int, int], folder: Path, length: int, rounds: int) -> dict[str, Any]:
    """A row of verified reads alone: int8 pages of random bytes of layers, heads and head dim."""
    layers, heads, head_dim = geometry
    side = SideFormat(head_dim, "bfloat16", 8, min(head_dim, 64), "float16")
    whose = Fingerprint(
        "config", "weights", "bfloat16", "{}", "full", "none", (LayerFormat(heads, side, side),) * layers
    )
    ids = text(length, 1)[0].tolist()
    nbytes = heads * page_bytes(whose, PAGE)
    runs = runs_of(range(length // PAGE), max(1, RUN_BYTES // nbytes))
    with KVStore(f"file://{folder}", read="always") as store:
        for run in runs:
            pages = bytearray(os.urandom(len(run) * nbytes))
            store.save(whose, "", ids[: run.stop * PAGE], run.start * PAGE, PAGE, pages)
            store.flush()
        files = [*folder.rglob("*.safetensors")]
        reads = time_reads(store, whose, ids, files, rounds)
    return {
        "geometry": geometry,
        "file_bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "read_ms": 1e3 * median(reads["read"]),
        "verified": ratio(reads["read"], reads["verified"]),
    }


def measure(model: Any, kind: str, folder: Path, length: int, steps: int, rounds: int) -> dict[str, Any]:
    """A row."""
    contest = Contest(model, KINDS[kind], folder, length, steps)
    first = in_turn(
        {way: partial(contest.until_first_token, way) for way in ("computed", "memory", "files")}, rounds, 1
    )
    with KVStore(contest.url, read="always") as store:
        whose = fingerprint_of(model, KINDS[kind])
        reads = time_reads(store, whose, contest.tokens[0, :-1].tolist(), contest.files, 5 * rounds)
    writes = in_turn({"quiet": lambda: contest.step(False), "writing": lambda: contest.step(True)}, rounds, 1)
    return {
        "kind": kind,
        "file_bytes": sum(path.stat().st_size for path in contest.files),
        "computed_ms": 1e3 * median(first["computed"]),
        "memory": ratio(first["computed"], first["memory"]),
        "files": ratio(first["computed"], first["files"]),
        "verified": ratio(reads["read"], reads["verified"]),
        "step_ms": 1e3 * median(writes["quiet"]),
        "writing": ratio(writes["writing"], writes["quiet"]) - 1,
        "commit_ms": 1e3 * median(contest.commits),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short prefix, to see that it runs")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    length, steps, rounds = (64, 2, 1) if args.quick else (2048, 128, args.rounds)
    model = make_model(1 if args.quick else 4)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(model, kind, Path(folder) / kind, length, steps, rounds) for kind in KINDS]
        reads = [
            measure_reads(geometry, Path(folder) / f"{geometry}", length, 5 * rounds)
            for geometry in GEOMETRIES
        ]
    data = os.urandom(64 << 20)  # zeros would be one page of memory, which stays in the cache
    times = [seconds(lambda _: xxhash.xxh3_128_digest(data), 0) for _ in range(rounds)]
    result = {
        "figure": "store",
        "tokens": length,
        "steps": steps,
        "rounds": rounds,
        "rows": rows,
        "reads": reads,
        "checksum_gb_per_s": len(data) / median(times) / 1e9,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
