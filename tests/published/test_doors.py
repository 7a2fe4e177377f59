"""Each door with models of published folders, cut to run: the stock cache's tokens, or a refusal by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import campaign
import pytest
import torch
from oracles.batching import batching_config
from published.folders import PUBLISHED, UNPLANNED, one_of_each, small_model
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationMixin

import kvloom
from kvloom import KVPool
from kvloom.carry.own.model_geometry import geometry_of
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import continuous_batching, disable, enable
from kvloom.integrations.transformers.supports import Support, support_of
from kvloom.integrations.transformers.versions import IS_4

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(IS_4, reason="classes and sessions that transformers 5 added are among these"),
]
TAKES_NO_CACHE = ("rwkv", "openai-gpt")
"""``enable`` says so in words of its own."""
PIECES = ("bamba", "jamba", "recurrent_gemma")
"""Pools and sessions try these, which transformers computes wrongly in pieces."""
NEW = 16


@dataclass
class Small:
    """A small model of a folder.

    Attributes:
        name: Name of the folder.
        model: The model, with the generation_config.json of the folder.
        path: The folder.
        given: What ``generate`` is given.
        stock: Its greedy tokens with transformers' own cache, ``[1, T]``.
        why_not: Why it does not allow a use, as ``kvloom supports`` says.
    """

    name: str
    model: Any
    path: Path
    given: dict[str, Any]
    stock: Tensor
    support: Support

    @property
    def kind(self) -> str:
        """Its ``model_type``."""
        return str(self.model.config.model_type)

    @property
    def reads(self) -> bool:
        """Whether it has an encoder."""
        return bool(self.model.config.is_encoder_decoder)

    def allows(self, use: str) -> bool:
        """Whether a use is allowed."""
        return not self.support.why_not[use]


def runs(name: str) -> bool:
    """Whether this transformers has a model of the folder."""
    return PUBLISHED[name].config["model_type"] in CONFIG_MAPPING


NAMES = [x for x in (PUBLISHED if campaign.is_whole() else one_of_each(lambda x: x.family)) if runs(x)]


@pytest.fixture(scope="module", params=NAMES)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    path = PUBLISHED[request.param].written_small(tmp_path_factory.mktemp("folder"))
    model = small_model(path)
    if model.main_input_name == "input_features":
        mel = torch.randn(1, model.config.num_mel_bins, 3000, generator=torch.Generator().manual_seed(1))
        given = {"input_features": mel}
    else:
        given = {"input_ids": torch.arange(100, 137)[None]}
    stock = generated(model, given)
    ends = model.generation_config.eos_token_id
    first = 1 if model.config.is_encoder_decoder else given["input_ids"].shape[1]
    if isinstance(ends, list) and stock.shape[1] > first + 8:  # the last of the list ends the text earlier
        model.generation_config.eos_token_id = [*ends[:-1], int(stock[0, first + 8])]
        stock = generated(model, given)
        assert stock.shape[1] <= first + 9
    yield Small(request.param, model, path, given, stock, support_of(model))


def generated(model: Any, given: dict[str, Any], **options: Any) -> Tensor:
    """Greedy tokens, with all else that the folder's generation_config.json says.

    Without Whisper's own ``generate``, which cuts long audio.
    """
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": NEW, "min_length": 0} | options
    found: Tensor = GenerationMixin.generate(model, **given, use_cache=True, **options)
    return found


def test_enabled_models_give_the_stock_tokens(small: Small) -> None:
    if small.kind in TAKES_NO_CACHE or not small.allows("KVCache"):
        with pytest.raises(
            UnsupportedError, match=r"takes no cache|must (work with a Dynamic|have layers that)"
        ):
            enable(small.model)
        return
    enable(small.model)
    try:
        assert torch.equal(generated(small.model, small.given), small.stock)
    finally:
        disable(small.model)


def test_pools_give_the_stock_tokens_with_found_prefixes(small: Small) -> None:
    options = {"max_encoder_tokens": 3200} if small.reads else {}
    if small.kind in PIECES or not small.allows("KVPool"):
        with pytest.raises(UnsupportedError, match=r"^model must ") as refused:
            KVPool.for_model(small.model, max_tokens=256, **options)
        assert small.kind in PIECES or str(refused.value) == small.support.why_not["KVPool"]
        return
    pool = KVPool.for_model(small.model, max_tokens=256, **options)
    for _ in range(2):
        if small.reads:
            start = small.stock[:, :1]
            cache = pool.begin(start, content=pool.content_of(small.given))
            given = small.given | cache.skip_encoder()
            out = generated(small.model, given, past_key_values=cache, decoder_input_ids=start)
            pool.commit(cache)
        else:
            cache = pool.begin(small.given["input_ids"])
            out = generated(small.model, small.given, past_key_values=cache)
            pool.commit(cache, out)
        assert torch.equal(out, small.stock)
    if not small.reads and not any("recurrent" in x for x in small.support.layers):
        assert pool.begin(small.given["input_ids"]).get_seq_length() == 32  # whole pages of 37 tokens


def test_sessions_give_the_stock_tokens_and_end_at_each_end(small: Small) -> None:
    settings = copy.deepcopy(small.model.generation_config)
    settings.update(do_sample=False, num_beams=1, max_new_tokens=NEW)
    before = small.model.config._attn_implementation
    if small.kind in PIECES or not small.allows("continuous_batching"):
        with pytest.raises(UnsupportedError, match=r"^model must ") as refused:
            continuous_batching(small.model)
            small.model.generate_batch([[5]], generation_config=settings)
        assert small.kind in PIECES or str(refused.value) == small.support.why_not["continuous_batching"]
        return
    continuous_batching(small.model)
    out = small.model.generate_batch(
        small.given["input_ids"].tolist() * 2,
        generation_config=settings,
        continuous_batching_config=batching_config(num_blocks=64),
    )
    small.model.set_attn_implementation(before)
    expected = small.stock[0, small.given["input_ids"].shape[1] :].tolist()
    assert [x.error for x in out.values()] == [None, None]
    assert [x.generated_tokens for x in out.values()] == [expected, expected]


def test_the_small_folder_is_planned_as_it_is_kept(small: Small) -> None:
    if small.reads:
        pytest.skip("tests/planning/test_plan_encoders.py compares both halves of encoder-decoders")
    if small.name in UNPLANNED:
        with pytest.raises(UnsupportedError, match=UNPLANNED[small.name]):
            kvloom.plan(small.path, context=48)
        return
    planned = kvloom.plan(small.path, context=48, at_once=True)
    if not small.allows("KVCache"):  # recurrent states alone
        assert planned.states > planned.cache == 0
        return
    enable(small.model, max_tokens=48)
    try:
        with torch.no_grad():
            cache = small.model(torch.arange(100, 148)[None], use_cache=True).past_key_values
        assert cache.nbytes == planned.cache
    finally:
        disable(small.model)


def test_geometries_are_those_of_the_text(small: Small) -> None:
    keeps = [*small.support.layers]
    if (
        small.reads
        or not small.allows("KVCache")
        or not all(x.startswith(("keys", "latents")) for x in keeps)
    ):
        with pytest.raises(UnsupportedError, match=r"^model must "):
            geometry_of(small.model)
        return
    if any("pictures" in x or "index" in x or "recurrent" in x for x in keeps):
        with pytest.raises(UnsupportedError, match=r"^model must keep keys and values in every layer"):
            geometry_of(small.model)
        return
    found = geometry_of(small.model)
    config = small.model.config.get_text_config(decoder=True)
    assert len(found.layers) == config.num_hidden_layers
    rope = getattr(config, "rope_parameters", None)
    if rope and "inv_freq" in {x.rpartition(".")[2] for x, _ in small.model.named_buffers()}:
        assert all(x.rotary for x in found.layers)
