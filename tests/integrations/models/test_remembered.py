"""What a model remembers of a text between forwards is the text's own, in every cache."""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.models import test_families
from integrations.models.test_families import SMALL
from integrations.models.test_vision_models import FAMILIES, prompts, vision_model
from torch import Tensor, nn

from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers import KVCache, KVPool, content_of, enable
from kvloom.integrations.transformers.fingerprint.unread import UNWATCHED
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT, as_argument, given_cache
from kvloom.integrations.transformers.models.remembered import memory_of, remembered_names
from kvloom.integrations.transformers.versions import IS_4
from kvloom.paging import Miss
from kvloom.store import KVStore

pytestmark = pytest.mark.skipif(IS_4, reason="4 counts by cache_position")
IMAGE, TEXT = 98, SMALL | {"vocab_size": 99, "head_dim": 8, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4}
TOWER |= {"out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2}
IDS = {"image_token_id": IMAGE, "video_token_id": 95, "vision_start_token_id": 96, "vision_end_token_id": 97}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
RECURRENT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
RECURRENT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
# Name of the classes, and arguments of the text's and of the tower's configuration.
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ({}, {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}),
    "Qwen2_5_VL": ({}, {"window_size": 16, "fullatt_block_indexes": [0]}),
    "Qwen3VL": ({}, {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}),
    "Glm4v": ({"pad_token_id": 0}, {"image_size": 32}),
    "Qwen3_5": (RECURRENT, {"num_position_embeddings": 64, "deepstack_visual_indexes": []}),
}
SEEING = {name: x for name, x in SEEING.items() if hasattr(transformers, f"{name}Config")}
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
OPTIONS["suppress_tokens"] = [*IDS.values()]


def seeing(name: str) -> Any:
    """A random model whose positions behind a picture depend on its sizes."""
    text, tower = SEEING[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(
        text_config=TEXT | {"rope_parameters": {**ROPE}, "rope_scaling": {**ROPE}} | text,
        vision_config=TOWER | tower,
        **IDS,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def chat(height: int, width: int, tail: list[int], seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens with a picture of ``height x width`` patches, and the picture."""
    rng = torch.Generator().manual_seed(seed)
    picture = {"pixel_values": torch.randn(height * width, 96, generator=rng)}
    picture["image_grid_thw"] = torch.tensor([[1, height, width]])
    return torch.tensor([[5, 6, 7, 96, *[IMAGE] * (height * width // 4), 97, *tail]]), picture


def beside(model: Any, ids: Tensor, picture: dict[str, Tensor], found: int = 0) -> dict[str, Tensor]:
    """Arguments beside tokens: of a picture that was found its sizes alone."""
    inputs = {name: x for name, x in picture.items() if name != "pixel_values" or not found}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def alone(model: Any, ids: Tensor, picture: dict[str, Tensor]) -> Tensor:
    """The tokens of ``generate`` with a stock cache that begins the text."""
    out: Tensor = model.generate(ids, **beside(model, ids, picture), **OPTIONS)
    return out


def asked(
    model: Any, pool: KVPool, ids: Tensor, picture: dict[str, Tensor], has_sizes: bool = True
) -> tuple[Tensor, int]:
    """The tokens of ``generate`` with a pool, which are committed, and the number of found tokens."""
    cache = pool.begin(ids, content=content_of(picture))
    found = int(cache.get_seq_length())
    inputs = beside(model, ids, picture, found) if has_sizes or not found else {}
    out = model.generate(ids, **{CACHE_ARGUMENT: cache}, **inputs, **OPTIONS)
    pool.commit(cache, out)
    return out, found


@pytest.mark.parametrize("name", list(SEEING))
def test_a_turn_after_another_chat_has_its_own_positions(name: str) -> None:
    model = seeing(name)
    pool = KVPool.for_model(model, page_size=4, max_tokens=1024, **interval(name))
    (first, picture), (other, other_picture) = chat(8, 4, [20, 21, 22, 23]), chat(4, 16, [30, 31], 1)
    asked(model, pool, first, picture)
    asked(model, pool, other, other_picture)
    for turn, has_sizes in (([60, 61], False), ([62, 63, 64, 65, 66], True)):
        ids = torch.cat((first, torch.tensor([turn])), 1)
        expected = alone(model, ids, picture)
        alone(model, other, other_picture)
        first, found = asked(model, pool, ids, picture, has_sizes)
        assert found >= 12 or name == "Qwen3_5"  # pictures cannot be cut into pieces
        assert torch.equal(first, expected)


def interval(name: str) -> dict[str, Any]:
    return {"state_interval": 4} if name == "Qwen3_5" else {}


@pytest.mark.parametrize("name", list(SEEING))
def test_a_forward_after_another_chat_has_its_own_positions(name: str) -> None:
    model = seeing(name)
    pool = KVPool.for_model(model, page_size=4, max_tokens=1024, **interval(name))
    ids, picture = chat(8, 4, [20, 21, 22, 23])
    rest = torch.tensor([[30, 31, 32]])
    caches: list[Any] = [KVCache.for_model(model), KVCache.for_model(model), pool.begin(ids, content="a")]
    logits = []
    with torch.no_grad():
        for i, cache in enumerate(caches):
            model(ids, **beside(model, ids, picture), **as_argument(model, cache))
            if i:
                alone(model, *chat(4, 16, [30, 31], 1))
            kept = cache.fork()
            logits.append(model(rest, **as_argument(model, cache)).logits)
            alone(model, *chat(4, 16, [30, 31], 1))
            logits.append(model(rest, **as_argument(model, kept)).logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])
    pool.commit(caches[-1], torch.cat((ids, rest), 1))
    cache = pool.begin(torch.cat((ids, rest), 1), content="a")
    past = int(cache.get_seq_length())
    assert past == (0 if name == "Qwen3_5" else 16)  # pictures cannot be cut into pieces
    if not past:
        return
    with torch.no_grad():
        found = model(torch.cat((ids, rest), 1)[:, past:], **as_argument(model, cache)).logits
    torch.testing.assert_close(found[:, -3:], logits[0])


@pytest.mark.parametrize("name", list(SEEING))
def test_a_text_after_a_picture_counts_from_zero(name: str) -> None:
    model = seeing(name)
    pool = KVPool.for_model(model, page_size=4, max_tokens=1024, **interval(name))
    text = torch.tensor([[*range(10, 30)]])
    with torch.no_grad():
        expected = model(text, use_cache=False).logits[:, 8:]
        for make in (lambda: pool.begin(text), lambda: KVCache.for_model(model)):
            cache = make()
            model(text[:, :8], **as_argument(model, cache))
            alone(model, *chat(4, 16, [30, 31], 1))
            found = model(text[:, 8:], **as_argument(model, cache)).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [x for x in SEEING if x != "Qwen3_5"])
def test_rows_go_on_from_their_own_pictures(name: str) -> None:
    model = seeing(name)
    pool = KVPool.for_model(model, page_size=4, max_tokens=2048)
    (tall, of_tall), (wide, of_wide) = chat(8, 4, [20] * 20), chat(4, 16, [21] * 12, 1)
    ids = torch.cat((tall, wide))
    both = {x: torch.cat((of_tall[x], of_wide[x])) for x in of_tall}
    text = torch.full((1, ids.shape[1]), 40)
    for rows, inputs, contents in (
        (ids, beside(model, ids, both), ["tall", "wide"]),
        (torch.cat((text, wide)), beside(model, torch.cat((text, wide)), of_wide), ["text", "wide"]),
        (wide, beside(model, wide, of_wide), ["wide"]),
    ):
        expected = model.generate(rows, **inputs, **OPTIONS)
        alone(model, tall, of_tall)
        for _ in range(2):
            cache = pool.begin(rows, content=contents)
            found = int(cache.get_seq_length())
            given = {} if found == 32 else inputs
            out = model.generate(rows, **{CACHE_ARGUMENT: cache}, **given, **OPTIONS)
            assert torch.equal(out, expected)
            pool.commit(cache, out)
        assert found == 32


def test_what_a_pool_does_not_know_is_computed_again(tmp_path: Path) -> None:
    """Pages of a store say nothing of what a model remembers behind their pictures."""
    model = seeing("Qwen2VL")
    ids, picture = chat(8, 4, [20, 21, 22, 23, 24, 25])
    expected = alone(model, ids, picture)
    for _ in range(2):
        with KVPool.for_model(
            model, page_size=4, max_tokens=512, store=KVStore(f"file://{tmp_path}", read="always")
        ) as pool:
            cache = pool.begin(ids, content=content_of(picture))
            assert cache.get_seq_length() == 0
            out = model.generate(ids, **{CACHE_ARGUMENT: cache}, **beside(model, ids, picture), **OPTIONS)
            assert torch.equal(out, expected)
            pool.commit(cache, out)
            assert pool.begin(ids, content=content_of(picture)).get_seq_length() == 16
            saved = io.BytesIO()
            torch.save(pool, saved)
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False).bind(model)
    alone(model, *chat(4, 16, [30, 31], 1))
    out, found = asked(model, loaded, ids, picture, has_sizes=False)
    assert found == 16
    assert torch.equal(out, expected)


def test_pictures_that_no_configuration_names_are_computed_again() -> None:
    model = seeing("Qwen2VL")
    memory = memory_of(model)
    assert memory is not None
    memory.pictures = frozenset()
    pool = KVPool.for_model(model, page_size=4, max_tokens=512)
    ids, picture = chat(8, 4, [20, 21, 22, 23])
    pool.record()
    assert [asked(model, pool, ids, picture)[1] for _ in range(2)] == [0, 0]
    assert pool.why(ids, content=content_of(picture)) == [Miss("no states", 0, 4)]
    text = torch.tensor([[*range(10, 30)]])
    assert [asked(model, pool, text, {})[1] for _ in range(2)] == [0, 16]


def test_pictures_behind_others_need_positions() -> None:
    model = seeing("Qwen2VL")
    pool = KVPool.for_model(model, page_size=4, max_tokens=512)
    ids, picture = chat(8, 4, [20, 21])
    cache = pool.begin(torch.cat((ids, ids), 1), content="two")
    with torch.no_grad():
        model(ids, **beside(model, ids, picture), **as_argument(model, cache))
        with pytest.raises(ArgumentError, match=r"^position_ids must be given for pictures after"):
            model(ids, **beside(model, ids, picture), **as_argument(model, cache))
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("removed", [2, 10])
def test_a_removed_picture_decides_no_pages(removed: int) -> None:
    model = seeing("Qwen2VL")
    pool = KVPool.for_model(model, page_size=4, max_tokens=512)
    ids, picture = chat(8, 4, [20, 21, 22, 23])
    rest = torch.tensor([[*range(30, 44)]])
    cache = pool.begin(ids, content="a")
    with torch.no_grad():
        model(ids, **beside(model, ids, picture), **as_argument(model, cache))
        cache.crop(-removed)
        model(rest, **as_argument(model, cache))
    whole = torch.cat((ids[:, :-removed], rest), 1)
    pool.commit(cache, whole)
    assert pool.begin(whole, content="a").get_seq_length() == (28 if removed == 2 else 0)


def test_a_loaded_cache_has_its_own_positions() -> None:
    model = seeing("Qwen2VL")
    ids, picture = chat(8, 4, [20, 21])
    more = torch.cat((ids, torch.tensor([[30, 31]])), 1)
    expected = alone(model, more, picture)
    cache, saved = KVCache.for_model(model), io.BytesIO()
    with torch.no_grad():
        model(ids, **beside(model, ids, picture), **as_argument(model, cache))
    torch.save(cache, saved)
    for make in (cache.fork, lambda: torch.load(io.BytesIO(saved.getvalue()), weights_only=False)):
        alone(model, *chat(4, 16, [30, 31], 1))
        own: Any = make()
        if own.remembered.memory is None:  # positions are made before the model sees the cache
            with pytest.raises(StateError, match=r"^rope_deltas of Qwen2VLModel must be of the text of the"):
                model.generate(more, **{CACHE_ARGUMENT: own}, **OPTIONS)
        assert torch.equal(model.generate(more, **{CACHE_ARGUMENT: own}, **OPTIONS), expected)


def test_what_earlier_releases_saved_remembers_nothing() -> None:
    model = seeing("Qwen2VL")
    pool = KVPool.for_model(model, page_size=4, max_tokens=512)
    (ids, picture), text = chat(8, 4, [20, 21, 22, 23]), torch.tensor([[*range(10, 30)]])
    asked(model, pool, ids, picture)
    asked(model, pool, text, {})
    saved = pickle.dumps({x: y for x, y in pool.__getstate__().items() if x != "_memory"})
    old = KVPool.__new__(KVPool)
    old.__setstate__(pickle.loads(saved))  # noqa: S301
    old.bind(model)
    assert [asked(model, old, *x)[1] for x in ((text, {}), (ids, picture), (ids, picture))] == [16, 0, 16]
    cache, other = KVCache.for_model(model), KVCache.__new__(KVCache)
    with torch.no_grad():
        model(text, **as_argument(model, cache))
    other.__setstate__({x: y for x, y in vars(cache).items() if x != "remembered"})
    assert other.fork().get_seq_length() == 20


@pytest.mark.parametrize("name", [x for x in SEEING if x != "Qwen3_5"])
def test_a_cache_of_an_enabled_model_has_its_own_positions(name: str) -> None:
    model = seeing(name)
    ids, picture = chat(8, 4, [20, 21])
    more = torch.cat((ids, torch.tensor([[30, 31]])), 1)
    expected = alone(model, more, picture)
    enable(model)
    out = model.generate(
        ids,
        **beside(model, ids, picture),
        **(OPTIONS | {"max_new_tokens": 1, "return_dict_in_generate": True}),
    )
    cache = given_cache(out)
    alone(model, *chat(4, 16, [30, 31], 1))
    assert torch.equal(model.generate(more, **{CACHE_ARGUMENT: cache}, **OPTIONS), expected)


@pytest.mark.parametrize("num_returned", [1, 3])
def test_beams_go_on_from_pictures(num_returned: int) -> None:
    model = seeing("Qwen2VL")
    pool = KVPool.for_model(model, page_size=4, max_tokens=1024)
    ids, picture = chat(8, 4, [20, 21, 22, 23, 24, 25])
    options = OPTIONS | {"num_beams": 3, "num_return_sequences": num_returned}
    expected = model.generate(ids, **beside(model, ids, picture), **options)
    for found in (0, 16):
        alone(model, *chat(4, 16, [30, 31], 1))
        cache = pool.begin(ids, content="a")
        assert cache.get_seq_length() == found
        inputs = {} if found else beside(model, ids, picture)
        out = model.generate(ids, **{CACHE_ARGUMENT: cache}, **inputs, **options)
        assert torch.equal(out, expected)
        pool.commit(cache, out)
    alone(model, *chat(4, 16, [30, 31], 1))
    last = torch.cat((out[:1], torch.tensor([[33]])), 1)
    expected = alone(model, last, picture)
    cache = pool.begin(last, content="a")
    assert cache.get_seq_length() == 24
    assert torch.equal(model.generate(last, **{CACHE_ARGUMENT: cache}, **OPTIONS), expected)


def test_beams_and_repeated_rows_keep_positions() -> None:
    model = seeing("Qwen2VL")
    ids, picture = chat(8, 4, [20, 21])
    rest = torch.tensor([[30, 31]])
    cache = KVCache.for_model(model)
    with torch.no_grad():
        model(ids, **beside(model, ids, picture), **as_argument(model, cache))
        rows = cache.fork()
        rows.batch_repeat_interleave(3)
        rows.batch_select_indices(torch.tensor([2, 0]))
        alone(model, *chat(4, 16, [30, 31], 1))
        one = model(rest, **as_argument(model, cache)).logits
        two = model(rest.repeat(2, 1), **as_argument(model, rows)).logits
    torch.testing.assert_close(two, one.expand(2, -1, -1))


def attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Attributes and buffers of all modules; of tensors with the number of their writes."""
    return {
        (path, name): (x, x._version if isinstance(x, Tensor) else None)
        for path, module in model.named_modules()
        for name, x in (vars(module) | module._buffers).items()
    }


def written_by(model: Any, inputs: dict[str, Any]) -> set[tuple[Any, str]]:
    """Modules and names of attributes that a forward and ``generate`` write."""
    before, modules = attributes(model), dict(model.named_modules())
    with torch.no_grad():
        model(**inputs)
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    after = attributes(model)
    return {
        (modules[path], name)
        for path, name in before.keys() | after.keys()
        if not same(before.get((path, name)), after.get((path, name)))
    }


def same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one[0] is other[0] and one[1] == other[1]


MODELS: dict[str, Callable[[], Any]] = {
    **{f"text {x}": lambda x=x: test_families.family(x) for x in test_families.FAMILIES},
    **{f"vision {x}": lambda x=x: vision_model(x) for x in FAMILIES},
    **{f"positions {x}": lambda x=x: seeing(x) for x in SEEING},
}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_forward_writes_what_is_remembered_and_nothing_else(name: str) -> None:
    model, kind = MODELS[name](), name.split()[1]
    inputs: list[dict[str, Any]] = [{"input_ids": torch.tensor([[5, 6, 7, 8]])}]
    inputs += [{"input_ids": torch.tensor([[*range(5, 45)]] * 2)}]
    if name.startswith("vision"):
        inputs += [prompts(kind, model, 2)]
    if name.startswith("positions"):
        ids, picture = chat(8, 4, [20])
        inputs += [{"input_ids": ids} | beside(model, ids, picture)]
    written = {pair for each in inputs for pair in written_by(model, each)}
    unknown = {
        (type(module).__name__, attribute)
        for module, attribute in written
        if attribute not in UNWATCHED and attribute not in remembered_names(module)
    }
    assert unknown == set()
    remembered = {attribute for module, attribute in written if attribute in remembered_names(module)}
    assert bool(remembered) == (name.startswith("positions") or "2.5-VL" in name)
