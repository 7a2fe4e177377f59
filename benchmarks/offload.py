"""Pages that move from a pool to a store in memory and back, against a copy of the same bytes.

    python benchmarks/offload.py [--rounds 15] [--kinds bfloat16 int8 int4] [--tokens 16 1000 100000]

A cache of 4 layers with 2 heads of 64 in pages of 16 tokens, on the CPU, in one thread beside the store's
own. ``commit`` is until the pages are copied and summed, which is what a request waits for; ``out`` until the
store has them; ``back`` is a ``begin`` that finds nothing in the cache and reads them into pages that were
used before. A ratio is the time of a copy of as many bytes into memory that was used before, by that of the
move, in the same round.

Prediction: ``commit`` fills memory with zeros, copies pages in pieces and sums them, three passes and new
memory, so a quarter of the speed of a copy; ``out`` and ``back`` copy twice more each, a fifth. One page
takes what Python takes, some hundred microseconds whatever its bytes.

Prints one JSON line.
"""

import argparse
import json
from typing import Any

import torch
from problem import KINDS
from rounds import microseconds, ratio, seconds

from kvloom.caches import CacheFormat, PrefixCache
from kvloom.store import Fingerprint, KVStore, entries_of, put_below
from kvloom.store.transfer import rotation_of

LAYERS, HEADS, HEAD_DIM, PAGE = 4, 2, 64, 16
NAMES = {"bfloat16": "bfloat16", "int8": "int8 g64", "int4": "int4 g64"}


class Moves:
    """One text in a cache.

    Args:
        kind: Name of the format.
        num_tokens: Length of the text.
    """

    def __init__(self, kind: str, num_tokens: int) -> None:
        dtype, quant = KINDS[NAMES[kind]]
        self.tokens = list(range(num_tokens + 1))  # the last one is always computed
        num_pages = -(-len(self.tokens) // PAGE)
        form = CacheFormat(quant=quant, page_size=PAGE, max_tokens=num_pages * PAGE)
        shape: dict[str, Any] = {"num_layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM}
        self.cache = PrefixCache(form, **shape, dtype=dtype)
        self.whose = Fingerprint(
            "config", "weights", str(dtype), "{}", "full", rotation_of(self.cache.pages.storages),
            entries_of(self.cache.pages.storages),
        )  # fmt: skip
        self.nbytes = sum(x.nbytes for x in self.whose.layers) * (num_tokens // PAGE * PAGE)
        self.source = torch.randint(0, 256, (self.nbytes,), dtype=torch.uint8)
        self.target = torch.ones_like(self.source)

    def measure(self) -> dict[str, float]:
        """Seconds of each move."""
        cache = self.cache
        with KVStore("memory://", read="always", max_queued=1 << 40) as store:
            put_below(cache, store, self.whose)
            sequence = cache.begin(self.tokens)
            self._write(sequence)
            commit = seconds(lambda _: cache.commit(sequence), 0)
            out = commit + seconds(lambda _: store.flush(), 0)
            cache.end(sequence)
            self._evict()
            back = seconds(lambda _: cache.begin(self.tokens), 0)
            (sequence,) = cache._sequences
            if sequence.num_cached != (len(self.tokens) - 1) // PAGE * PAGE:
                raise RuntimeError(f"{sequence.num_cached} tokens came back")
            cache.end(sequence)
            self._evict()
        copied = seconds(lambda _: self.target.copy_(self.source), 0)
        return {"copy": copied, "commit": commit, "out": out, "back": back}

    def _write(self, sequence: Any) -> None:
        states = torch.randn(2, sequence.num_pending, HEADS, HEAD_DIM)
        for layer in range(LAYERS):
            self.cache.append(sequence, layer, *states)

    def _evict(self) -> None:
        pool = self.cache.pages.pool
        for ref in pool.take(pool.num_pages):
            pool.release(ref)


def measure(kind: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """A row."""
    moves = Moves(kind, num_tokens)
    found = [moves.measure() for _ in range(rounds + 1)][1:]
    times = {name: [x[name] for x in found] for name in found[0]}
    row: dict[str, Any] = {"kind": kind, "tokens": num_tokens, "bytes": moves.nbytes}
    for name, own in times.items():
        row[f"{name}_us"] = microseconds(own)
        if name != "copy":
            row[f"{name}_ratio"] = ratio(times["copy"], own)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, few rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="*", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 1000, 100_000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds, lengths = (1, [16, 100]) if args.quick else (args.rounds, args.tokens)
    rows = [measure(kind, length, rounds) for length in lengths for kind in args.kinds]
    print(json.dumps({"figure": "offload", "rounds": rounds, "rows": rows}))


if __name__ == "__main__":
    main()
