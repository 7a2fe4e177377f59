"""Slots of llama.cpp's own server: saved there and read here, written here and restored there."""

from __future__ import annotations

import pytest
import torch
from carry import test_engines as real
from carry.engines.llama_server import LlamaServer

from kvloom import KVCache
from kvloom.carry import expect_first_layer, from_cache, geometry_of, read_llama, to_cache, write_llama

VERSION = "0.6.0"
PACKED = 4
"""Numbers that the server packs with the ids of a text without pictures."""
ROOT = real.ENGINES / "llama-server"
pytestmark = [
    pytest.mark.process,
    pytest.mark.model,
    pytest.mark.skipif(
        not (ROOT.exists() and (real.ENGINES / "llama/bin/python").exists()),
        reason="make test-engines installs engines",
    ),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> real.Given:
    return real.given_of("bundled", tmp_path_factory.mktemp("server"))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_a_slot_goes_on_in_either(given: real.Given, kind: str) -> None:
    model, geometry, folder = given.model, geometry_of(given.model), given.folder
    rotated = True if kind.startswith("q") else None
    cache = KVCache.for_model(model)
    model(torch.tensor([given.held]), past_key_values=cache)
    written = folder / "written.bin"
    write_llama(from_cache(cache, model, given.held), written, geometry, kind=kind, rotated=rotated,
                rounding=kind != "f32", version=VERSION)  # fmt: skip
    with LlamaServer(ROOT, folder, kind, 512) as server:
        own = server.complete(given.ids, real.NEW)
        server.ask("/slots/0?action=erase", {})
        server.complete(given.held, 0)
        server.slot("save", "saved.bin")
        server.ask("/slots/0?action=erase", {})
        assert server.slot("restore", "written.bin")["n_restored"] == len(given.held)
        found = server.complete(given.ids, real.NEW)
        assert found["tokens"] == own["tokens"] and found["timings"]["cache_n"] == len(given.held)
        server.slot("save", "back.bin")
    saved = read_llama(folder / "saved.bin", geometry)  # says itself whether it is rotated
    assert saved.tokens == tuple(given.held)
    expect_first_layer(saved, model)
    again = folder / "again.bin"
    write_llama(saved, again, geometry, rotated=rotated, version=VERSION)
    head = 12 + 4 * len(given.held)
    assert again.read_bytes()[head:] == (folder / "saved.bin").read_bytes()[head + 4 * PACKED :]
    back = read_llama(folder / "back.bin", geometry)
    assert back.tokens == (*given.ids, *own["tokens"][:-1])
    ids = torch.tensor([[*given.ids, *own["tokens"]]])
    went_on = model.generate(ids, past_key_values=to_cache(back, model), max_new_tokens=8, do_sample=False)
    stock = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(went_on, stock)
