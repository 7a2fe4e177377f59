"""Recurrent states go back: what follows a crop follows the same steps without those that were taken back."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from oracles.pairs import in_turn, pairs_in_turn
from oracles.stateful_models import CACHES_SEE_STATES, folders, mixers, small_model, stateful_model
from torch import Tensor

from kvloom import KVCache, KVPool, disable, enable
from kvloom.errors import StateError
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.integrations.transformers.states.mixers import is_mixer
from kvloom.ops.impl import cpu

FAMILIES, MIXERS = folders(), mixers()
needs = [
    pytest.mark.skipif(not CACHES_SEE_STATES, reason="mixers of this transformers change states unseen"),
    pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size"),
]
pytestmark = needs
KINDS = ["auto", "int8", "int4:g8"]
EPSILONS = 512
"""Rounding of logits, as ``try_states`` has it."""


def text(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def model_of(name: str, attention: str = "stock", dtype: str = "float32") -> Any:
    model = small_model(name)
    if name != "inkling2":  # which computes in float32 alone, and gives attention sinks of each query
        model.to(getattr(torch, dtype))
        if attention == "kvloom":
            model.set_attn_implementation("kvloom")
    return model


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Tensor, steps: list[int], **options: Any) -> Tensor:
    """The logits of the last of several steps of a text."""
    start, logits = 0, torch.empty(0)
    for n in steps:
        logits = model(ids[:, start : start + n], past_key_values=cache, **options).logits
        start += n
    return logits


def content(cache: Any) -> list[Tensor]:
    """Copies of all that a cache holds."""
    found: list[Tensor] = []
    for layer in cache.layers:
        for kind in ("conv", "recurrent") if isinstance(layer, StatefulLayer) else ():
            states = getattr(layer, f"{kind}_states").items()
            found += [x.clone() for i, x in states if x is not None and layer.has_previous_state[i]]
        found += getattr(layer, "gathered", lambda: None)() or ()
    return found


def are_same(a: Any, b: Any) -> bool:
    one, other = content(a), content(b)
    return len(one) == len(other) and all(map(torch.equal, one, other))


def tolerance(logits: Tensor, layers: int = 4) -> float:
    eps = torch.finfo(torch.float32).eps
    return float(EPSILONS * eps * layers**0.5 * logits.square().mean().sqrt())


@pytest.mark.parametrize(
    ("name", "kv", "rows", "attention", "dtype"),
    pairs_in_turn(FAMILIES, KINDS, [1, 3], ["stock", "kvloom"], ["float32", "bfloat16"]),
)
def test_steps_that_are_taken_back_leave_the_bits_of_those_before(
    name: str, kv: str, rows: int, attention: str, dtype: str
) -> None:
    model, draw = model_of(name, attention, dtype), random.Random(f"{name}{kv}{rows}")
    steps = [23, *draw.choices([1, 1, 1, 2, 5, 11], k=10)]
    ids, cache = text(sum(steps), rows), KVCache.for_model(model, kv, rollback=16)
    feed(model, cache, ids, steps)
    twin = KVCache.for_model(model, kv)
    ends = [sum(steps[:i]) for i in range(len(steps) + 1)]
    start = next(i for i, end in enumerate(ends) if end >= ends[-1] - 16)
    feed(model, twin, ids, steps[:start])
    new = text(4, rows, seed=1)
    for end, n in zip(ends[start:], [*steps[start:], 0], strict=True):
        shorter, other = cache.fork(), twin.fork()
        if end < ends[-1]:
            shorter.crop(end - ends[-1])
        assert are_same(shorter, other)
        logits = feed(model, shorter, new, [1, 3])
        assert torch.equal(logits, feed(model, other, new, [1, 3]))
        if n:
            feed(model, twin, ids[:, end:], [n])


@pytest.mark.parametrize(
    ("name", "kv", "rows", "kept"), pairs_in_turn(MIXERS, ["auto", "int8"], [1, 3], [2, 3, 7])
)
def test_a_crop_within_a_step_leaves_the_shorter_step(name: str, kv: str, rows: int, kept: int) -> None:
    model, ids = model_of(name), text(40, rows)
    cache, twin = (KVCache.for_model(model, kv, rollback=16) for _ in range(2))
    feed(model, cache, ids, [21, 1, 9])
    cache.crop(kept - 9)
    feed(model, twin, ids, [21, 1, kept])
    assert cache.get_seq_length() == 22 + kept
    for turn in range(2):  # goes on recording
        logits, wanted = (feed(model, x, text(6, rows, turn), [1, 5]) for x in (cache, twin))
        allowed = tolerance(wanted) if kv == "auto" else 0.02 * float(wanted.std())  # another code
        assert (logits - wanted).abs().max() <= allowed
        for x in (cache, twin):
            x.crop(-3)


@pytest.mark.parametrize("name", [x for x in FAMILIES if x.startswith("lfm")])
@pytest.mark.parametrize("kept", [1, 4])
def test_a_batch_invariant_step_has_the_bits_of_the_shorter_one(name: str, kept: int) -> None:
    model, ids = model_of(name), text(40)  # whose states are those of convolutions
    enable(model, batch_invariant=True)
    cache, twin = (KVCache.for_model(model, rollback=16) for _ in range(2))
    feed(model, cache, ids, [21, 8])
    cache.crop(kept - 8)
    feed(model, twin, ids, [21, kept])
    assert are_same(cache, twin)


@pytest.mark.parametrize(("name", "kv"), in_turn(MIXERS, ["auto", "int8"]))
def test_rows_go_back_apart(name: str, kv: str) -> None:
    model, ids = model_of(name), text(40, 3)
    cache = KVCache.for_model(model, kv, rollback=16)
    feed(model, cache, ids, [20, 6])
    cache.crop([-4, 0, -1])
    cache.crop([0, 0, 0])
    new, ends = text(1, 3, seed=1), [22, 26, 25]
    mask = torch.arange(cache.get_seq_length() + 1)[None] >= 26 - torch.tensor(ends)[:, None]
    position = {} if name == "nemotron_h" else {"position_ids": torch.tensor(ends)[:, None]}
    logits = feed(model, cache, new, [1], attention_mask=mask.long(), **position)
    for row, end in enumerate(ends):
        twin = KVCache.for_model(model, kv)
        wanted = feed(
            model, twin, torch.cat([ids[row : row + 1, :end], new[row : row + 1]], 1), [20, end - 20, 1]
        )
        allowed = tolerance(wanted) if kv == "auto" else 0.02 * float(wanted.std())
        assert (logits[row] - wanted[0]).abs().max() <= allowed
    cache.crop(-1)
    with pytest.raises(StateError, match="at least 26 tokens must stay"):
        cache.crop(-1)  # rows went back apart, and nothing was recorded since


@pytest.mark.parametrize(("name", "rows"), in_turn(MIXERS, [[2, 0, 0], [1], [0, 1, 2, 2, 1]]))
def test_rows_that_were_selected_go_back(name: str, rows: list[int]) -> None:
    model, ids = model_of(name), text(60, 3)
    cache, twin = (KVCache.for_model(model, rollback=16) for _ in range(2))
    for x in (cache, twin):
        feed(model, x, ids, [20, 1, 1, 4])
        x.batch_select_indices(torch.tensor(rows))
        feed(model, x, ids[rows, 26:], [1])
    feed(model, cache, ids[rows, 27:], [3, 1])
    cache.reorder_cache(torch.arange(len(rows)).flip(0))
    cache.crop(-4)
    twin.reorder_cache(torch.arange(len(rows)).flip(0))
    assert are_same(cache, twin)
    cache.crop(-5)  # to where there were other rows
    twin = KVCache.for_model(model)
    feed(model, twin, ids, [20, 1, 1])
    twin.batch_select_indices(torch.tensor(rows[::-1]))
    assert are_same(cache, twin)


@pytest.mark.parametrize("way", ["fork", "deepcopy"])
def test_forks_go_back_apart(way: str) -> None:
    model, ids = stateful_model("qwen3_next"), text(60)
    cache = KVCache.for_model(model, rollback=16)
    feed(model, cache, ids, [20, 1, 1, 3])
    fork = cache.fork() if way == "fork" else copy.deepcopy(cache)
    feed(model, fork, ids, [2])
    cache.crop(-4)
    feed(model, cache, ids, [7, 7])
    fork.crop(-6)
    twin = KVCache.for_model(model)
    feed(model, twin, ids, [20, 1])
    assert are_same(fork, twin)


def test_a_saved_cache_records_from_where_it_was_saved() -> None:
    model, ids = stateful_model("falcon_h1"), text(60)
    cache = KVCache.for_model(model, rollback=16)
    feed(model, cache, ids, [20, 3])
    loaded = pickle.loads(pickle.dumps(cache))  # noqa: S301
    assert loaded.rollback == 16
    with pytest.raises(StateError, match="at least 23 tokens must stay"):
        loaded.crop(-1)
    feed(model, loaded, ids[:, 23:], [1, 4])
    loaded.crop(-5)
    assert are_same(loaded, cache)


def test_a_cache_that_was_reset_records_anew() -> None:
    model, ids = stateful_model("qwen3_next"), text(60)
    cache, twin = KVCache.for_model(model, rollback=16), KVCache.for_model(model)
    feed(model, cache, ids, [30, 1])
    cache.reset()
    feed(model, cache, ids, [10, 4])
    cache.crop(-4)
    feed(model, twin, ids, [10])
    assert are_same(cache, twin)
    cache.crop(-10)
    feed(model, cache, ids, [10])
    assert are_same(cache, twin)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("broken", ["norm", "linear", "attention"])
def test_a_forward_that_broke_off_is_taken_back(name: str, broken: str) -> None:
    model, ids = stateful_model(name), text(60)
    cache = KVCache.for_model(model, rollback=16)
    feed(model, cache, ids, [20, 1])
    before = content(cache)
    mixer = [x for x in model.modules() if is_mixer(type(x))]
    attention = [x for x in model.modules() if type(x).__name__.endswith("Attention")]
    module = {"norm": list(model.modules())[-1], "linear": mixer[-1], "attention": attention[0]}[broken]
    if broken == "linear":
        module = next(x for x in list(module.modules())[::-1] if type(x).__name__ == "Linear")

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        feed(model, cache, ids, [4])
    handle.remove()
    cache.crop(-4)
    assert all(map(torch.equal, before, content(cache)))
    twin = KVCache.for_model(model)
    feed(model, twin, ids, [20, 1])
    assert torch.equal(feed(model, cache, ids[:, 21:], [1, 3]), feed(model, twin, ids[:, 21:], [1, 3]))


@pytest.mark.parametrize("name", [x for x in MIXERS if x != "inkling2"])
def test_of_a_long_step_the_last_tokens_are_kept(name: str) -> None:
    model, ids = model_of(name), text(620, 2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache, twin = KVCache.for_model(model, rollback=64), KVCache.for_model(model)
    logits, wanted = (feed(model, x, ids, [600], attention_mask=mask[:, :600]) for x in (cache, twin))
    assert (logits - wanted).abs().max() <= tolerance(wanted)
    kept, width = 600 - 512, model.config.get_text_config().hidden_size
    rows = 2 * kept * (width * 4 + 8) + kept * 16 * 4  # hidden states and a mask, and positions that turn
    assert cache.nbytes_rollback <= nbytes_of_states(cache) + 4 * rows
    least = "sequence 0 must keep" if name == "lara_mini" else "at least 512 tokens must stay"  # its window
    with pytest.raises(StateError, match=least):
        cache.crop(-100)
    cache.crop(-64)
    twin = KVCache.for_model(model)
    feed(model, twin, ids, [536], attention_mask=mask[:, :536])
    longer = {"attention_mask": mask[:, :537]}
    logits, wanted = (feed(model, x, ids[:, 536:], [1], **longer) for x in (cache, twin))
    assert (logits - wanted).abs().max() <= tolerance(wanted)


def nbytes_of_states(cache: Any) -> int:
    layers = [x for x in cache.layers if isinstance(x, StatefulLayer)]
    states = [x for layer in layers for y in (layer.conv_states, layer.recurrent_states) for x in y.values()]
    return sum(x.nbytes for x in states if x is not None)


def test_what_is_kept_does_not_grow() -> None:
    model, ids = stateful_model("granitemoehybrid"), text(500)
    cache = KVCache.for_model(model, rollback=8)
    draw, sizes = random.Random(0), []
    for _ in range(150):
        feed(model, cache, ids, [draw.choice([1, 1, 1, 3])])
        sizes.append(cache.nbytes_rollback)
    assert max(sizes[75:]) <= max(sizes[:75])
    assert max(sizes) <= 4 * nbytes_of_states(cache) + 2 * 24 * 32 * 4


def test_what_mixers_were_given_may_be_changed_afterwards() -> None:
    model, ids = stateful_model("granitemoehybrid"), text(40)
    cache, twin = (KVCache.for_model(model, rollback=16) for _ in range(2))

    def overwrite(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        kwargs["hidden_states"].zero_()

    for module in model.modules():
        if is_mixer(type(module)):
            module.register_forward_hook(overwrite, with_kwargs=True)
    feed(model, cache, ids, [20, 1, 1, 1])
    feed(model, twin, ids, [20, 1])
    cache.crop(-2)
    assert are_same(cache, twin)


@pytest.mark.parametrize("name", ["falcon_h1", "inkling2"])
def test_forks_record_what_drafts_may_take_back(name: str) -> None:
    cache = KVCache.for_model(model_of(name))
    cache.activate_past_recording()
    fork = cache.fork()
    assert fork.rollback == cache.rollback == 128
    assert all(x.is_recording for x in fork.sequences)
    assert not any(fork.is_recording_past(i) for i in range(len(fork.layers)))  # columns of convolutions


def test_dtypes_that_torch_chose_are_chosen_again() -> None:
    model, ids = stateful_model("granitemoehybrid"), text(40)
    cache, twin = (KVCache.for_model(model, rollback=16) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        feed(model, cache, ids, [20, 1, 1, 1])
        feed(model, twin, ids, [20, 1])
    cache.crop(-2)
    assert are_same(cache, twin)


def test_models_are_watched_once_and_are_what_they_were() -> None:
    model, ids = stateful_model("qwen3_next"), text(60)
    pool = KVPool.for_model(model, page_size=8, max_tokens=400, state_interval=16)
    cache = pool.begin(ids)
    feed(model, cache, ids, [60])
    pool.commit(cache, ids)
    for _ in range(2):
        KVCache.for_model(model, rollback=16)
    hooks = [len(x._forward_pre_hooks) for x in model.modules() if is_mixer(type(x))]
    assert hooks == [1] * 2
    cache = pool.begin(ids)
    assert cache.get_seq_length() == 48
    cache.rollback = 16
    other = pool.begin(ids)
    feed(model, cache, ids[:, 48:], [1, 8])
    feed(model, other, ids[:, 48:], [1])
    cache.crop(-8)
    assert are_same(cache, other)
    with pytest.raises(StateError, match="at least 48 tokens must stay"):
        cache.crop(-2)
    disable(model)
