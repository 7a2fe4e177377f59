"""Damaged, foreign and missing objects in a store of a model with recurrent states: none is accepted.

A pool asks for a text, of which the store has keys and values, and states behind three multiples of the grid.
One or two of these objects are other bytes, or are not there. What is found must not need them, and has the
bits of what was computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from campaign import times
from integrations.pool.test_pool_states import FAMILIES, GRID, asked, logits_of, pool_of, text
from oracles.stateful_models import stateful_model
from torch import Tensor

pytest.importorskip("xxhash")

from store.runs import damaged

from kvloom.integrations.transformers import KVPool
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.integrations.transformers.states.specs import states_of
from kvloom.store import KVStore, read_head
from kvloom.store.backends.memory import MemoryBackend
from kvloom.store.below import StoreBelow
from kvloom.store.digests import salt_digest

pytestmark = pytest.mark.skipif(
    StatefulLayer is type(None), reason="this transformers has no recurrent states in its caches"
)
NUM_OFFERED = times(60)
ENDS = [GRID, 2 * GRID, 3 * GRID]
TEXT = text(3 * GRID + 9)
PIECES = [TEXT[:, : end + 1] for end in ENDS]
SALTS = ["", "one", "two", "three", "four"]
FAMILY = "qwen3_next" if "qwen3_next" in FAMILIES else "lfm2"


class Part(NamedTuple):
    """What an object of a store has.

    Attributes:
        what: ``"states"``, ``"residual"`` or ``"keys"``; empty for what is no run of pages.
        salt: Digest of its salt.
        first: Position of its first token.
        end: Position behind its last.
        size: Bytes in front of its pages.
    """

    what: str
    salt: bytes = b""
    first: int = 0
    end: int = 0
    size: int = 0


def part_of(file: bytes) -> Part:
    try:
        run, size = read_head(file, len(file))
    except ValueError:
        return Part("")
    attention = run.fingerprint.attention
    what = next((x for x in ("states", "residual") if attention.startswith(x)), "keys")
    return Part(what, run.salt, run.first, run.end, size)


def stored(model: Any, kv: str, texts: Mapping[str, Sequence[Tensor]], **options: Any) -> dict[str, bytes]:
    """The objects of a store to which texts were committed under their salts, one after the other."""
    url = f"memory://written-{random.random()}"
    with KVStore(url, read="always") as store:
        pool = pool_of(model, kv, store=store, **options)
        for salt, committed in texts.items():
            for ids in committed:
                asked(model, pool, ids, salt=salt)
        assert pool.flush()
    return {name: b"".join(parts) for name, (parts, _) in MemoryBackend._shared.pop(url)._objects.items()}


def foreign(model: Any, kv: str) -> list[bytes]:
    """Objects of other texts, of another grid, kind and page size, and of another state of the model."""
    parted = torch.cat([TEXT[:, : GRID + 3], text(2 * GRID + 6, 2)], 1)
    others = [
        stored(model, kv, {"0": [text(2 * GRID + 9, 1), text(3 * GRID + 9, 1), parted]}),
        stored(model, kv, {"0": [TEXT]}, state_interval=GRID // 2),
        stored(model, "int8", {"0": [TEXT]}),
        stored(model, kv, {"0": [TEXT]}, page_size=16),
    ]
    with torch.no_grad():
        before = model.lm_head.weight.clone()
        model.lm_head.weight[0] += 1
        others.append(stored(model, kv, {"0": PIECES}))
        model.lm_head.weight.copy_(before)
    return [file for objects in others for file in objects.values()]


def changed(
    name: str,
    good: Mapping[str, bytes],
    others: Sequence[bytes],
    parts: Mapping[str, Part],
    rng: random.Random,
) -> bytes | None:
    """Other bytes in the place of an object, or none."""
    file, size = good[name], parts[name].size
    match rng.randrange(8):
        case 0:
            return None
        case 1:  # one bit
            at = rng.randrange(8 * len(file))
            return file[: at // 8] + bytes([file[at // 8] ^ 1 << at % 8]) + file[at // 8 + 1 :]
        case 2:
            return file[: rng.randrange(len(file))]
        case 3:  # two parts of its pages change places
            data, width = bytearray(file), rng.randrange(1, 65)
            a, b = (rng.randrange(size, max(len(file) - width, size + 1)) for _ in range(2))
            data[a : a + width], data[b : b + width] = data[b : b + width], data[a : a + width]
            return bytes(data[: len(file)])
        case 4:  # the pages of another object behind its own head
            other = rng.choice([x for x in good if x != name])
            return file[:size] + good[other][parts[other].size :]
        case 5:
            return good[rng.choice([x for x in good if x != name])]
        case 6:
            return rng.choice(others)
        case _:
            return damaged(file, rng)


def offers(
    good: Mapping[str, bytes], others: Sequence[bytes], rng: random.Random
) -> Iterator[tuple[dict[str, bytes], set[str]]]:
    """Objects of a store, and the names of those that are not what was written: none at first."""
    parts = {name: part_of(file) for name, file in good.items()}
    salts: dict[bytes, list[str]] = {}
    for name, part in parts.items():
        if part.what:
            salts.setdefault(part.salt, []).append(name)
    yield dict(good), set()
    while True:
        objects, wrong = dict(good), set[str]()
        for names in salts.values():
            for name in rng.sample(names, rng.choice([1, 1, 2])):
                file = changed(name, good, others, parts, rng)
                if file == good[name]:
                    continue
                wrong.add(name)
                objects.pop(name)
                if file is not None:
                    objects[name] = file
        yield objects, wrong


def most_found(parts: Sequence[Part]) -> int:
    """Tokens of the longest prefix that needs none of some wrong objects."""
    states = {part.end for part in parts if part.what == "states"}
    keys = min((part.first for part in parts if part.what == "keys"), default=ENDS[-1])
    return max((end for end in ENDS if end <= keys and end not in states), default=0)


def all_of(pool: KVPool, cache: Any) -> list[Tensor]:
    """Keys, values and states."""
    assert pool._states is not None
    pairs = [x for layer in cache.layers if hasattr(layer, "keys") for x in (layer.keys, layer.values)]
    states = states_of(cache.layers, pool._states.pages.specs)
    return [x for x in pairs if isinstance(x, Tensor)] + [x for own in states.values() for x in own]


@pytest.mark.campaign
@torch.no_grad()
@pytest.mark.parametrize("kv", ["auto", "int4:g8"])
def test_no_object_that_is_not_what_was_written_is_accepted(kv: str) -> None:
    model: Any = stateful_model(FAMILY)
    good, others = stored(model, kv, dict.fromkeys(SALTS, PIECES)), foreign(model, kv)
    parts = {name: part_of(file) for name, file in good.items()}
    pool = pool_of(model, kv, store=KVStore("memory://", read="always"))
    identities, groups = [*pool._identities()], pool._prefixes.groups
    wanted = {}
    for end in ENDS:
        logits_of(model, cache := pool_of(model, kv).begin(TEXT), TEXT[:, :end])
        wanted[end] = all_of(pool, cache)
    num_wrong, num_found = 0, Counter[int]()
    for step, (objects, wrong) in enumerate(offers(good, others, random.Random(kv))):
        url = f"memory://offered-states-{kv}-{step}"
        for name, file in objects.items():
            MemoryBackend.of_url(url).put_if_absent(name, [file])
        with KVStore(url, read="always") as store:
            for group, identity in zip(groups, identities, strict=True):
                group.tree.evict(group.pages.pool.num_evictable)
                group.below = StoreBelow(store, group.pages, group.tree, *identity)
            for salt in SALTS:
                own = [parts[x] for x in wrong if parts[x].salt == salt_digest(salt)]
                cache = pool.begin(TEXT, salt)
                found = int(cache.get_seq_length())
                assert found <= most_found(own), own
                if found:
                    have = all_of(pool, cache)
                    assert len(have) == len(wanted[found])
                    assert all(map(torch.equal, have, wanted[found])), own
                num_found[found] += 1
                del cache
        MemoryBackend._shared.pop(url)
        num_wrong += len(wrong)
        if num_wrong >= NUM_OFFERED:
            break
    assert num_found[ENDS[-1]] >= len(SALTS)  # where nothing was wrong
    assert num_found.keys() == {0, *ENDS}
