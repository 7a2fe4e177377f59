"""Good calls of every operator and dialect function, small and many: what hostile arguments are made from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView, Side

Call = tuple[Callable[..., Any], dict[str, Any]]
H, D, SLOTS, BLOCK = 2, 16, 24, 8
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def sides(rng: random.Random, layout: str = "B S H D") -> dict[str, Tensor | None]:
    """Keys and values of 24 slots in blocks of 8, plain or codes, as canonical views."""
    bits, group = rng.choice((0, 8, 4, 2)), rng.choice((4, 8, 16))
    axes = CacheLayout(rng.choice((layout, "B H S D")))
    stored = {0: rng.choice(FLOATS), 8: torch.int8, 4: torch.uint8, 2: torch.bits2x4}[bits]
    sizes = {"B": SLOTS // BLOCK, "S": BLOCK, "H": H}
    shape = axes.shape(**sizes, D=D * (bits or 8) // 8)
    key, value = (
        torch.zeros(shape, dtype=torch.uint8).view(stored) if bits else torch.zeros(shape, dtype=stored)
        for _ in range(2)
    )
    scales: tuple[Tensor | None, ...] = (None, None)
    if bits:
        scales = tuple(
            torch.ones(axes.for_scale().shape(**sizes, D=D // group), dtype=torch.float16) for _ in range(2)
        )
    kv = KVView.split(axes, key, value, *scales)
    return dict(zip(("key", "value", "key_scale", "value_scale"), kv.tensors, strict=True))


def caches(rng: random.Random) -> dict[str, Tensor | None]:
    """``sides`` under the names of the schema."""
    return {name.replace("key", "key_cache") if name == "key" else name.replace("value", "value_cache")
            if name == "value" else name: x for name, x in sides(rng).items()}  # fmt: skip


def slots(rng: random.Random, count: int) -> Tensor:
    return torch.tensor(rng.sample(range(SLOTS), count), dtype=rng.choice((torch.int64, torch.int32)))


def ragged() -> dict[str, Any]:
    """Two sequences of 2 and 1 new tokens behind 3 and 5."""
    return {"seqstarts": ints(0, 2, 3), "kvstarts": ints(0, 5, 11)}


# --- operators as torch has them ----------------------------------------------------------------------------


def bare_store(rng: random.Random) -> Call:
    dtype = rng.choice(FLOATS)
    given = {
        "key": floats(3, H, D, dtype=dtype),
        "value": floats(3, H, D, dtype=dtype),
        "slots": slots(rng, 3),
    }
    return torch.ops.kvloom.store.default, {**given, **caches(rng), "full_range": rng.random() < 0.5}


def bare_load(rng: random.Random) -> Call:
    given = {
        "slots": slots(rng, 5),
        **caches(rng),
        "dtype": rng.choice(FLOATS),
        "num_repeat": rng.choice((1, 2)),
    }
    return torch.ops.kvloom.load.default, given


def bare_copy(rng: random.Random) -> Call:
    source = [x for x in caches(rng).values() if x is not None]
    target = source if rng.random() < 0.5 else [x.clone() for x in source]

    def call(**given: Any) -> None:
        pair = given.pop("source_slots"), given.pop("target_slots")
        sources, targets = (
            [given[f"{side}{i}"] for i in range(len(source))] for side in ("source", "target")
        )
        torch.ops.kvloom.copy.default(sources, pair[0], targets, pair[1])

    given = {f"source{i}": x for i, x in enumerate(source)} | {f"target{i}": x for i, x in enumerate(target)}
    return call, {**given, "source_slots": slots(rng, 4), "target_slots": slots(rng, 4)}


def attend_arguments(rng: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {"query": floats(3, 2 * H, D, dtype=rng.choice(FLOATS)), **caches(rng)}
    if rng.random() < 0.5:
        given |= {"table": ints(0, 8).view(2, 1), "row_starts": None, "page_size": BLOCK}
    else:
        given |= {"table": torch.randperm(SLOTS)[:11], "row_starts": ints(0, 5), "page_size": 1}
    given |= ragged() | {"decoding_batches": rng.choice((0, 1)), "first_visible": ints(0, 1), "scale": 0.25}
    given |= {"is_causal": True, "mask": floats(3, 11), "alibi_slopes": floats(2 * H), "window": 4}
    return given | {"softcap": 2.0, "sinks": floats(2 * H)}


def positional(rng: random.Random) -> dict[str, Any]:
    """A positional bias, or none."""
    if rng.random() < 0.5:
        return {}
    frequencies = floats(H, 3).to(rng.choice((torch.float64, torch.float32)))
    coefficients = floats(3, 2 * H, 6, dtype=rng.choice(FLOATS))
    first = rng.choice((None, ints(0, 9)))
    return {"coefficients": coefficients, "frequencies": frequencies, "first_position": first}


def bare_attend(rng: random.Random) -> Call:
    bias, attend = positional(rng), torch.ops.kvloom.attend
    return attend.biased if bias else attend.default, attend_arguments(rng) | bias


def bare_attend_out(rng: random.Random) -> Call:
    bias, attend, given = positional(rng), torch.ops.kvloom.attend, attend_arguments(rng)
    out = {"out": torch.zeros_like(given["query"])}
    return attend.biased_out if bias else attend.out, given | bias | out


_OF_BIAS = ("coefficients", "frequencies", "first_position")


def of_one_head(given: dict[str, Any]) -> dict[str, Any]:
    """The same of latents and rope keys, which have one head."""
    caches = {name: x[:, :, :, :1] for name, x in given.items() if "cache" in name or name.endswith("_scale")
              if x is not None}  # fmt: skip
    return given | caches | {"query": torch.cat((given["query"], given["query"]), -1)}


def bare_attend_latent(rng: random.Random) -> Call:
    return torch.ops.kvloom.attend.latent, of_one_head(attend_arguments(rng))


def bare_attend_latent_part(rng: random.Random) -> Call:
    def call(prior_out: Any = None, prior_lse: Any = None, **given: Any) -> None:
        torch.ops.kvloom.attend_part.latent(**given, prior=prior_out, prior_lse=prior_lse)

    given = {name: x for name, x in part_arguments(rng).items() if name not in _OF_BIAS}
    return call, of_one_head(given)


def part_arguments(rng: random.Random) -> dict[str, Any]:
    prior = {"prior_out": floats(3, 2 * H, D), "prior_lse": floats(3, 2 * H)} if rng.random() < 0.7 else {}
    given = attend_arguments(rng) | positional(rng)
    return given | {"skip": rng.choice((None, 1, 3)), "skip_from": ints(2, 0)} | prior


def bare_attend_part(rng: random.Random) -> Call:
    def call(prior_out: Any = None, prior_lse: Any = None, **given: Any) -> None:
        part = torch.ops.kvloom.attend_part
        operator = part.biased if "coefficients" in given else part.default
        operator(**given, prior=prior_out, prior_lse=prior_lse)

    return call, part_arguments(rng)


def bare_rotate(rng: random.Random) -> Call:
    shape = rng.choice(((3, H, D), (2, 3, H, D), (0, H, D)))
    return torch.ops.kvloom.rotate.default, {"x": floats(*shape, dtype=rng.choice(FLOATS)), "block": 8}


def smoothing(rng: random.Random) -> dict[str, Any]:
    """What smooths keys of 2 heads, with an offset or without."""
    frequencies, channels = floats(H, 3).to(rng.choice((torch.float64, torch.float32))), torch.arange(6)
    given: dict[str, Any] = {"mean": floats(H, 3, 2), "channels": channels.view(3, 2).repeat(H, 1, 1)}
    given |= {"frequencies": frequencies}
    return given if rng.random() < 0.8 else dict.fromkeys(given)


def bare_smooth(rng: random.Random) -> Call:
    is_batch, head_dim = rng.random() < 0.5, rng.choice((D, D + 4))
    x = floats(*((2, H, 3) if is_batch else (3, H)), head_dim, dtype=rng.choice(FLOATS))
    given: dict[str, Any] = {"key": x, "factor": floats(H, head_dim)} | smoothing(rng)
    positions = torch.arange(
        x.shape[0] * (3 if is_batch else 1), dtype=rng.choice((torch.int64, torch.int32))
    )
    given["positions"] = None if given["mean"] is None else positions.view(2, 3) if is_batch else positions
    given |= {"block": rng.choice((0, 4)), "is_restored": rng.random() < 0.5}
    return torch.ops.kvloom.smooth.default, given


def bare_store_transformed(rng: random.Random) -> Call:
    _, given = bare_store(rng)
    numbers = smoothing(rng) | {"factor": floats(H, D)}
    numbers["positions"] = None if numbers["mean"] is None else torch.arange(3)
    blocks = {"key_block": rng.choice((0, 4, 16)), "value_block": rng.choice((0, 8))}
    return torch.ops.kvloom.store.transformed, given | blocks | numbers


def bare_load_transformed(rng: random.Random) -> Call:
    _, given = bare_load(rng)
    del given["num_repeat"]
    numbers = smoothing(rng) | {"factor": floats(H, D)}
    numbers["positions"] = None if numbers["mean"] is None else torch.arange(5)
    blocks = {"key_block": rng.choice((0, 4, 16)), "value_block": rng.choice((0, 8))}
    return torch.ops.kvloom.load.transformed, given | blocks | numbers


def bare_smooth_query(rng: random.Random) -> Call:
    given = {"query": floats(3, 2 * H, D, dtype=rng.choice(FLOATS)), "gain": floats(H, D)} | smoothing(rng)
    del given["frequencies"]
    return torch.ops.kvloom.smooth_query.default, given | {"block": rng.choice((0, 8))}


# --- public operators ---------------------------------------------------------------------------------------


def view(given: dict[str, Any], suffix: str = "_cache") -> KVView:
    key, value = given.pop(f"key{suffix}"), given.pop(f"value{suffix}")
    key_scale, value_scale = given.pop("key_scale"), given.pop("value_scale")
    return KVView(Side(key, key_scale), None if value is None else Side(value, value_scale))


def store(rng: random.Random) -> Call:
    _, given = bare_store(rng)
    backend = rng.choice(("auto", "reference"))

    def call(**given: Any) -> None:
        ops.store(kv=view(given), backend=backend, **given)

    return call, given


def load(rng: random.Random) -> Call:
    _, given = bare_load(rng)
    backend = rng.choice(("auto", "reference"))

    def call(**given: Any) -> None:
        ops.load(kv=view(given), backend=backend, **given)

    return call, given


def copy(rng: random.Random) -> Call:
    given = caches(rng) | {"source_slots": slots(rng, 4), "target_slots": slots(rng, 4)}
    backend = rng.choice(("auto", "reference"))

    def call(**given: Any) -> None:
        kv = view(given)
        ops.copy(kv, given["source_slots"], kv, given["target_slots"], backend=backend)

    return call, given


def store_transformed(rng: random.Random) -> Call:
    backend = rng.choice(("auto", "reference"))

    def call(**given: Any) -> None:
        numbers = [given[name] for name in ("mean", "channels", "frequencies")]
        offset = None if numbers[0] is None else ops.KeyOffset(*numbers, D)
        names = ("key", "value", "slots", "full_range", "positions")
        how = {name: given[name] for name in names} | {"blocks": (given["key_block"], given["value_block"])}
        ops.store(**how, kv=view(given), smoothing=ops.KeySmoothing(given["gain"], offset), backend=backend)

    _, given = bare_store_transformed(rng)
    del given["factor"]
    return call, given | {"gain": torch.ones(H, D)}


def load_transformed(rng: random.Random) -> Call:
    backend = rng.choice(("auto", "reference"))

    def call(**given: Any) -> None:
        numbers = [given[name] for name in ("mean", "channels", "frequencies")]
        offset = None if numbers[0] is None else ops.KeyOffset(*numbers, D)
        how = {name: given[name] for name in ("slots", "dtype", "positions")}
        how["blocks"] = given["key_block"], given["value_block"]
        ops.load(**how, kv=view(given), smoothing=ops.KeySmoothing(given["gain"], offset), backend=backend)

    _, given = bare_load_transformed(rng)
    del given["factor"]
    return call, given | {"gain": torch.ones(H, D)}


def over_stored(given: dict[str, Any]) -> tuple[Tensor, KVView, ops.Batch, ops.Scores]:
    """The first arguments of public attention."""
    kv = view(given)
    index = CacheIndex(given["table"], given["row_starts"], given["page_size"])
    batch = ops.Batch(
        index, *(given[x] for x in ("seqstarts", "kvstarts", "decoding_batches", "first_visible"))
    )
    names = ("scale", "is_causal", "mask", "alibi_slopes", "window", "softcap", "sinks")
    bias = None
    if "coefficients" in given:
        bias = ops.PositionalBias(*(given[x] for x in ("coefficients", "frequencies", "first_position")))
    scores = ops.Scores(*(given[x] for x in names), positional_bias=bias)
    return given["query"], kv, batch, scores


def attend(rng: random.Random) -> Call:
    backend, arguments = rng.choice(("auto", "reference")), attend_arguments(rng) | positional(rng)
    if rng.random() < 0.5:
        arguments["out"] = torch.zeros_like(arguments["query"])

    def call(**given: Any) -> None:
        ops.attend(*over_stored(given), out=given.get("out"), backend=backend)

    return call, arguments


def attend_latent(rng: random.Random) -> Call:
    backend, arguments = rng.choice(("auto", "reference")), of_one_head(attend_arguments(rng))

    def call(**given: Any) -> None:
        ops.attend(*over_stored(given), is_latent=True, backend=backend)

    return call, arguments


def attend_part(rng: random.Random) -> Call:
    backend = rng.choice(("auto", "reference"))

    def call(**given: Any) -> None:
        more = {name: given[name] for name in ("skip", "skip_from")}
        if "prior_out" in given:
            more["prior"] = ops.Part(given["prior_out"], given["prior_lse"])
        ops.attend_part(*over_stored(given), **more, backend=backend)

    return call, part_arguments(rng)


def rotate(rng: random.Random) -> Call:
    _, given = bare_rotate(rng)
    return ops.rotate, given | {"backend": rng.choice(("auto", "reference"))}


def smooth(rng: random.Random) -> Call:
    def call(**given: Any) -> None:
        names = ("mean", "channels", "frequencies")
        mean, channels, frequencies = (given.get(name) for name in names)
        offset = None if mean is None else ops.KeyOffset(mean, channels, frequencies, given["head_dim"])
        found = ops.KeySmoothing(given["gain"], offset)
        found.smoothed(given["key"], given["positions"], given["block"])
        found.restored(given["key"], given["positions"], given["block"])
        found.query(given["query"], None, given["block"])

    _, given = bare_smooth(rng)
    heads, head_dim = given.pop("factor").shape
    del given["is_restored"]
    more: dict[str, Any] = {"gain": torch.ones(heads, head_dim), "query": floats(3, 2 * heads, head_dim)}
    return call, given | more | {"head_dim": head_dim}


BARE = (bare_store, bare_load, bare_copy, bare_attend, bare_attend_out, bare_attend_part, bare_rotate,
        bare_smooth, bare_smooth_query, bare_attend_latent, bare_attend_latent_part,
        bare_store_transformed, bare_load_transformed)  # fmt: skip
PUBLIC = (store, load, copy, attend, attend_latent, attend_part, rotate, smooth, store_transformed,
          load_transformed)  # fmt: skip
