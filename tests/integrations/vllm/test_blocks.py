"""vLLM's blocks and the pages of a store; without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvloom.core.specs import QuantSpec
from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import blocks
from kvloom.integrations.vllm.blocks import Blocks, Group
from kvloom.integrations.vllm.pages import PageFormat
from kvloom.store import Fingerprint, KVStore

pytest.importorskip("xxhash")

LAYERS, HEADS, DIM, NUM_BLOCKS = 3, 4, 64, 12
FULL = [Group((0, 1, 2), 32)]
HYBRID = [Group((0, 2), 64), Group((1,), 32, window=40)]
TOKENS = list(range(7, 7 + 192))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of a store in memory."""
    return str(request.node.name).translate(str.maketrans("[]:", "---"))


def fingerprint(groups: Sequence[Group], quant: QuantSpec | None, heads: int = HEADS) -> Fingerprint:
    layer = blocks.layer_format(heads, DIM, torch.float32, quant)
    text = blocks.attention_text(groups)
    return Fingerprint("model", "weights", "float32", "rope", text, "none", (layer,) * LAYERS)


def rank(
    groups: Sequence[Group], quant: QuantSpec | None, heads: range = range(HEADS), seed: int | None = None
) -> tuple[Blocks, list[Tensor]]:
    """Pages of some heads, random or empty, and the memory that they lie in."""
    content = PageFormat.heads(DIM, torch.float32, quant).content_bytes
    sizes = {layer: group.block_size for group in groups for layer in group.layers}
    draw = torch.Generator().manual_seed(seed or 0)
    memory = []
    for layer in range(LAYERS):
        shape = (NUM_BLOCKS, HEADS, sizes[layer], content)
        drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        memory.append((drawn if seed is not None else torch.zeros_like(drawn))[:, heads.start : heads.stop])
    views = {i: PageFormat.heads(DIM, torch.float32, quant).view(x) for i, x in enumerate(memory)}
    return Blocks(fingerprint(groups, quant), heads, groups, views), memory


def stored(
    packed: bytearray, groups: Sequence[Group], quant: QuantSpec | None, size: int, name: str
) -> KVStore:
    store = KVStore(f"memory://{name}")
    store.save(fingerprint(groups, quant), "", TOKENS[: len(TOKENS) // size * size], 0, size, packed)
    assert store.flush(10)
    return store


@pytest.mark.parametrize("quant", [None, QuantSpec(8), QuantSpec(4)], ids=str)
def test_what_is_packed_comes_back_in_other_blocks(quant: QuantSpec | None, name: str) -> None:
    ours, memory = rank(FULL, quant, seed=1)
    packed = ours.pack([[3, 1, 7, 2, 9, 4]], range(6))
    store = stored(packed, FULL, quant, 32, name)
    theirs, empty = rank(FULL, quant)
    (piece,) = store.load(fingerprint(FULL, quant), "", TOKENS)
    theirs.unpack(piece, [[5, 6, 8, 1, 2, 3]], len(TOKENS))
    for a, b in zip(memory, empty, strict=True):
        assert torch.equal(a[[3, 1, 7, 2, 9, 4]], b[[5, 6, 8, 1, 2, 3]])
        assert not b[[0, 4, 7, 9, 10, 11]].any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_of_ranks_one_behind_the_other_are_all_heads(ranks: int, name: str) -> None:
    quant, ids = QuantSpec(8), [[3, 1, 7, 2, 9, 4]]
    whole, _ = rank(FULL, quant, seed=1)
    heads = [blocks.heads_of(HEADS, i, ranks) for i in range(ranks)]
    parts = [rank(FULL, quant, some, seed=1)[0].pack(ids, range(6)) for some in heads]
    assert b"".join(parts) == whole.pack(ids, range(6))
    store = stored(whole.pack(ids, range(6)), FULL, quant, 32, name)
    theirs, empty = rank(FULL, quant, heads[1])
    (piece,) = store.load(fingerprint(FULL, quant), "", TOKENS, heads=heads[1])
    theirs.unpack(piece, ids, len(TOKENS))
    _, wanted = rank(FULL, quant, heads[1], seed=1)
    assert all(torch.equal(a[ids[0]], b[ids[0]]) for a, b in zip(wanted, empty, strict=True))


def test_ranks_beyond_the_heads_share_one() -> None:
    assert [blocks.heads_of(2, i, 4) for i in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [blocks.heads_of(8, i, 2) for i in range(2)] == [range(4), range(4, 8)]


def test_a_layer_with_a_window_has_what_the_window_reaches(name: str) -> None:
    quant = QuantSpec(8)
    ours, memory = rank(HYBRID, quant, seed=1)
    assert ours.page_size == 64
    ids = [[3, 1, 7], [2, 3, 4, 5, 6, 7]]
    assert all(ours.has(ids, page) for page in range(3)) and not ours.has(ids, 3)
    passed = [[3, 1, 7], [0, 0, 4, 5, 6, 7]]
    assert [ours.has(passed, page) for page in range(3)] == [False, True, True]
    store = stored(ours.pack(ids, range(3)), HYBRID, quant, 64, name)
    theirs, empty = rank(HYBRID, quant)
    (piece,) = store.load(fingerprint(HYBRID, quant), "", TOKENS)
    theirs.unpack(piece, [[4, 5, 6], [0, 0, 0, 0, 9, 8]], len(TOKENS))
    assert torch.equal(empty[0][[4, 5, 6]], memory[0][[3, 1, 7]])
    assert torch.equal(empty[1][[9, 8]], memory[1][[6, 7]])
    assert not empty[1][:8].any()


def test_a_prefix_goes_on_in_the_middle_of_what_was_read(name: str) -> None:
    quant, ids = QuantSpec(8), [[3, 1, 7, 2, 9, 4]]
    ours, memory = rank(FULL, quant, seed=1)
    store = stored(ours.pack(ids, range(6)), FULL, quant, 32, name)
    theirs, empty = rank(FULL, quant)
    (piece,) = store.load(fingerprint(FULL, quant), "", TOKENS, 64)
    theirs.unpack(piece, ids, 160)
    assert torch.equal(empty[0][[7, 2, 9]], memory[0][[7, 2, 9]])
    assert not empty[0][[3, 1, 4]].any()


def test_windows_are_part_of_what_bytes_mean() -> None:
    assert blocks.attention_text(FULL) == "full"
    assert blocks.attention_text(HYBRID) == "windows 0 40 0"


def test_layers_with_different_heads_are_for_one_rank() -> None:
    quant = QuantSpec(8)
    mixed = fingerprint(FULL, quant)
    layers = (*mixed.layers[:2], replace(mixed.layers[2], heads=2))
    with pytest.raises(UnsupportedError, match="equal heads for a store on several ranks"):
        Blocks(replace(mixed, layers=layers), range(1), FULL, {})


def test_a_layer_says_which_of_its_codes_are_rotated() -> None:
    kept = blocks.layer_format(2, 64, torch.float32, QuantSpec(4), "keys")
    assert kept.key.rotated and kept.value is not None and not kept.value.rotated
    assert blocks.layer_format(2, 64, torch.float32, None, "keys") == blocks.layer_format(
        2, 64, torch.float32, None
    )
