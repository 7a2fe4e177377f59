"""A cache through LMCache's own engine: llama.cpp's state, its chunks on the disk, ``KVCache``, and back."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from carry.models import prefilled

from kvloom import load_model
from kvloom.models import bundled_model_path, corpus_files

pytestmark = [
    pytest.mark.model,
    pytest.mark.process,
    pytest.mark.skipif(find_spec("lmcache") is None, reason="needs lmcache, which `make test-lmcache` gets"),
    pytest.mark.filterwarnings("ignore"),
]
NAME, CHUNK, HELD, NEW = "kvloom", 64, 192, 32


def engine_on(folder: Path, shape: tuple[int, ...], held: dict[str, Any]) -> Any:
    """An engine without a device, whose chunks ``[2, L, T, H D]`` come from ``held`` and go there."""
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.v1.metadata import LMCacheMetadata

    class OfTensors(MockGPUConnector):
        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size((2, shape[0], num_tokens, shape[3] * shape[4]))

        def batched_from_gpu(self, chunks: Any, starts: Any, ends: Any, **_: Any) -> None:
            for chunk, start, end in zip(chunks, starts, ends, strict=True):
                chunk.tensor.copy_(held["tokens"][:, :, start:end])

        def batched_to_gpu(self, chunks: Any, starts: Any, ends: Any, **_: Any) -> None:
            held["tokens"] = torch.cat([x.tensor.clone() for x in chunks], 2)

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.1, local_disk=f"file://{folder}/",
        max_local_disk_size=0.1, lmcache_instance_id=NAME,
    )  # fmt: skip
    metadata = LMCacheMetadata("bundled", 1, 1, 0, 0, torch.float32, shape, role="worker", chunk_size=CHUNK)
    engine = LMCacheEngineBuilder.get_or_create(
        NAME, config, metadata, OfTensors(shape), lambda x, rank: None, lambda x, rank: x
    )
    engine.post_init()
    return engine


def test_chunks_of_its_engine_go_on_in_other_engines(tmp_path: Path) -> None:
    """The same bytes of the state, and the greedy tokens of a model that computes all itself."""
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    from kvloom.carry import (
        CarriedCache,
        CarriedLayer,
        CarriedSide,
        expect_first_layer,
        from_cache,
        geometry_of,
        llama_state,
        read_llama,
        to_cache,
    )  # fmt: skip

    model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    text = max((x.read() for x in corpus_files("heldout")), key=len)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : HELD + 1]
    geometry, tokens = geometry_of(model), ids[0, :HELD].tolist()
    state = llama_state(from_cache(prefilled(model, ids[:, :HELD]), model, tokens), geometry)
    carried = read_llama(state, geometry, tokens=tokens)
    sides = [[x.load().flatten(1) for _, x in layer.sides] for layer in carried.layers]
    held = {"tokens": torch.stack([torch.stack(x) for x in zip(*sides, strict=True)])}
    sizes = geometry.layers[0]
    engine = engine_on(tmp_path, (len(geometry.layers), 2, CHUNK, sizes.heads, sizes.key_dim), held)
    try:
        engine.store(tokens)
        for _ in range(6000):  # it writes to the disk in a thread of its own
            if engine.lookup(tokens) == HELD:
                break
            time.sleep(0.01)
        given = held.pop("tokens")
        assert engine.retrieve(tokens).all()
    finally:
        LMCacheEngineBuilder.destroy(NAME)
    assert torch.equal(held["tokens"], given)
    vectors = held["tokens"].unflatten(-1, (sizes.heads, -1))
    found = [[CarriedSide.of(x) for x in layer] for layer in vectors.unbind(1)]
    again = CarriedCache(tuple(CarriedLayer(*x) for x in found), HELD, tuple(tokens))
    expect_first_layer(again, model)
    assert llama_state(again, geometry) == state
    alone = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    continued = model.generate(
        ids, past_key_values=to_cache(again, model), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    assert torch.equal(continued, alone)
