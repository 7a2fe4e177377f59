"""What named layouts are held against: the table in docs/layouts.md, and packages that are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvloom import KVTensors, Placement, convert
from kvloom.errors import ArgumentError
from kvloom.layouts import LAYOUTS, find_layout
from kvloom.layouts.catalog import RETIRED

ROOT = Path(__file__).parents[2]


def test_every_named_layout_is_in_the_table_once_with_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.split("| layout |")[1].split("\n\n")[0].splitlines()[2:]
    ]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(names) == sorted(LAYOUTS)
    for row in rows:
        assert all(row), row
        tests = re.findall(r"\]\(\.\./([^)]+)\)", row[3])
        assert tests and all((ROOT / path).is_file() for path in tests), row


def test_caches_of_transformers_are_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    key, value = torch.randn(2, 2, 4, 3, 8)  # [B, H, T, D]
    cache = transformers.DynamicCache()
    cache.update(key, value, 0)
    kept = {"key": cache.layers[0].keys, "value": cache.layers[0].values}
    found = convert(KVTensors(kept, "hugging_face"), "B S H D").tensors
    for side, x in (("key", key), ("value", value)):
        assert all(torch.equal(found[side][b, t, h], x[b, h, t]) for b, h, t in torch.cartesian_prod(
            torch.arange(2), torch.arange(4), torch.arange(3)).tolist())  # fmt: skip


@pytest.mark.parametrize("name", ["jax_ragged", "openvino_paged"])
def test_pages_are_as_their_owners_index_them(name: str) -> None:
    """JAX reads keys from heads ``0::2`` of its pages and values from ``1::2``; OpenVINO has both apart."""
    key, value = torch.randn(2, 12, 3, 8)  # [T, H, D]
    found = convert(KVTensors({"key": key, "value": value}, "T H D"), Placement(name, page_size=4)).tensors
    for t in range(12):
        if name == "jax_ragged":
            page = found["cache"].flatten(2, 3)[t // 4, t % 4]  # [2 H, D]
            pair = page[0::2], page[1::2]
        else:
            pair = found["key"][t // 4, :, t % 4], found["value"][t // 4, :, t % 4]
        assert torch.equal(pair[0], key[t]) and torch.equal(pair[1], value[t])


@pytest.mark.parametrize("name", RETIRED)
def test_a_name_that_no_engine_has_is_refused_with_what_to_say_instead(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"source_layout must be .* '{name}' was '2 B H S D'"):
        find_layout("source_layout", name)
    others = re.findall(r"'(\w+)'", RETIRED[name])
    assert others and all(other in LAYOUTS for other in others) and name not in LAYOUTS


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.float64, 8)])
def test_a_layout_that_its_owner_has_for_other_sizes_is_refused(dtype: torch.dtype, itemsize: int) -> None:
    cache = KVTensors({"cache": torch.zeros(1, 2, 32, 1, 16, dtype=dtype)}, "L 2 T H D")
    with pytest.raises(
        ArgumentError, match=f"'vllm_cpu_amx' must have 1 or 2 bytes an element, got {itemsize}"
    ):
        convert(cache, Placement("vllm_cpu_amx", 32))
    tiles = {"key": torch.zeros(1, 1, 2, 8, 16, 2), "value": torch.zeros(1, 1, 1, 16, 16, 2)}
    with pytest.raises(ArgumentError, match="bytes an element, got 4"):
        KVTensors(tiles, "vllm_cpu_amx")
