"""Loss of quality of quantized caches, and their bytes, on held-out text. Prints one JSON line.

The bundled model reads windows of 512 tokens in chunks of 32, so that attention reads what the cache made of
the tokens before, as in decoding. ``loss`` is the mean over all next tokens in nats and ``perplexity`` its
exponential, ``mean_kl`` the mean of KL(DynamicCache || cache) of their distributions, ``agreed`` the share of
positions with the same first choice. ``nbytes_per_token`` is counted, scales included, on 8192 tokens that
are stored at once, of which the caches of transformers leave none unquantized.

A token attends most to itself and the tokens just before it, so it matters which of these are unquantized
(``unquantized``): in kvloom's int4 the last 64 of each token and, read through tensors, up to 31 more, with
``recent=0`` none, where a chunk comes back as it was stored and its length changes nothing; in the integer
caches of transformers the chunk and up to 128 tokens before it, a quarter of a window. These are measured as
they come; quanto, the faster, also fed token by token with nothing kept but the token itself.

Prediction: a group of g shares a float16 scale, so half the group costs 16/g bits more per element and lowers
int4's KL a few times less than a bit would; int8 is lossless to the fourth digit of the loss in any group.
Errors of keys pass through a softmax and errors of values average out, so int8 keys with int4 values
(int8/int4) are better than the reverse at the same bytes.
"""

import argparse
import gc
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from peers import RESIDUAL, Contender, fill, installed, kvloom, quantized, stock
from torch import Tensor

from kvloom.integrations.transformers import load_model
from kvloom.measuring.quality import ROWS, WINDOW, Peer, quality, windows_of
from kvloom.models import bundled_model_path, iter_texts

GROUPS = (64, 32, 16, 8)
BITS = (("int8", None), ("int8", "int4"), ("int4", "int8"), ("int4", None))
RECENT = (
    *(("int4", None, 64, recent) for recent in (64, 32, 128)),
    ("int4", None, 32, 64),
    ("int4", None, 16, 64),
    ("int8", "int4", 64, 64),
    ("int4", "int2", 64, 64),
    ("int2", None, 64, 64),
)
"""Kinds of keys and values, groups and residual windows; the first is the default of ``"int4"``."""
PEERS = (("quanto", 4, RESIDUAL), ("quanto", 4, 1), ("hqq", 4, RESIDUAL), ("hqq", 8, RESIDUAL))
CHUNK = 32


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender, the tokens it is fed at a time, its group and its residual window."""

    contender: Contender
    chunk: int = CHUNK
    group: int | None = None
    unquantized: int = 0

    @property
    def peer(self) -> Peer:
        """The contender, as ``quality`` takes it."""
        return Peer(self.contender.name, lambda model: self.contender.make(model, ROWS * WINDOW), self.chunk)


def contenders() -> list[Entrant]:
    """All but DynamicCache."""
    ours = [Entrant(kvloom(kv, values, group=g), group=g) for kv, values in BITS for g in GROUPS]
    for kv, values, group, recent in RECENT:
        contender = kvloom(kv, values, group=group, recent=recent)
        ours.append(Entrant(contender, group=group, unquantized=recent))
    peers = [
        Entrant(quantized(backend, bits, residual=residual), min(residual, CHUNK), 64, residual)
        for backend, bits, residual in PEERS
    ]
    return [Entrant(quantized("fp8", 8)), *peers, *ours]


def nbytes_per_token(model: Any, contender: Contender, num_tokens: int) -> float:
    """Bytes of the tensors that come to life with a cache, by its tokens."""
    gc.collect()
    before = live_storages()
    cache = contender.make(model, num_tokens)
    fill(cache, model, num_tokens)
    gc.collect()
    after = live_storages()
    return sum(nbytes for address, nbytes in after.items() if address not in before) / num_tokens


def live_storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of Python holds, by address; wrappers without memory have none."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not is_wrapper(x)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def is_wrapper(x: Tensor) -> bool:
    """Whether ``x`` is of a class that keeps its data in other tensors, as quanto's are."""
    return hasattr(type(x), "__tensor_flatten__")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument(
        "--quick", action="store_true", help="a short text and few caches, to see that it runs"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    num_tokens, stored = (128, 1024) if args.quick else (args.windows * WINDOW, 8192)
    windows = windows_of(tokenizer, iter_texts("heldout"), num_tokens)
    gc.freeze()  # what is imported by now holds no cache, so it need not be searched again
    wanted = [x for x in contenders() if not args.quick or (x.chunk > 1 and x.group in (None, 64))]
    found, missing = installed([x.contender for x in wanted], model)
    entrants = [x for x in wanted if x.contender in found]
    measured = quality(model, windows, [entrant.peer for entrant in entrants])
    rows = [
        {
            "contender": entrant.contender.name,
            "group": entrant.group,
            "unquantized": entrant.unquantized,
            "nbytes_per_token": nbytes_per_token(model, entrant.contender, stored),
            "loss": math.log(row.perplexity),
            "perplexity": row.perplexity,
            "mean_kl": row.mean_kl,
            "agreed": row.agreed,
        }
        for entrant, row in zip([Entrant(stock()), *entrants], measured, strict=True)
    ]
    tokens = measured[0].num_tokens
    print(json.dumps({"figure": "quality", "tokens": tokens, "missing": missing, "rows": rows}))


if __name__ == "__main__":
    main()
