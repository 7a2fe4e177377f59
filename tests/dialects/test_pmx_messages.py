"""Errors of the PMX operators speak of the arguments of their documents, word for word."""

from __future__ import annotations

import pytest
import torch
from dialects.test_pmx_errors_dynamic import PAGES, good_call, ints
from torch import Tensor

from kvloom.dialects import pmx
from kvloom.errors import KVError

MESSAGES: list[tuple[dict[str, object], str]] = [
    ({"cachestarts": torch.zeros(8)}, "cachestarts must be torch.int64 or torch.int32, got torch.float32"),
    ({"cachestarts": ints([8, 3], [0, -1]).short()},
     "cachestarts must be torch.int64 or torch.int32, got torch.int16"),
    ({"cachestarts": ints([8, 3], [0, -1]), "cache_mode": 0}, "cachestarts must be [B], got [2, 2]"),
    ({"cachestarts": torch.tensor(0)}, "cachestarts must be [B, P], got []"),
    ({"cachestarts": ints([[8, 3], [0, -1]])}, "cachestarts must be [B, P], got [1, 2, 2]"),
    ({"cachestarts": ints(0, 1, 2, 3, 4, 5, 6)}, "cachestarts must be [8], got [7]"),
    ({"cachestarts": [8, 3]}, "cachestarts must be a tensor, got list"),
    ({"cachestarts": ints([8, 3])}, "cachestarts must have 2 rows, one a sequence, got [1, 2]"),
    ({"cachestarts": ints([8, 12], [0, -1])},
     "cachestarts must be in [0, 12) for every token, got first slot 12 for the 2 tokens of page 1 of "
     "sequence 0"),
    ({"kvstarts": ints(0, 6, 8).float()}, "kvstarts must be torch.int64 or torch.int32, got torch.float32"),
    ({"page_size": 0}, "page_size must be at least 1, got 0"),
    ({"page_size": True}, "page_size must be at least 1, got True"),
    ({"page_size": 2**63}, f"page_size must be below {2**63}, got {2**63}"),
    ({"layer_idx": 2}, "layer_idx must be in [0, 2), got 2"),
    ({"layer_idx": 1.0}, "layer_idx must be an int, got 1.0"),
    ({"cache_layout": 4}, "cache_layout must be in [0, 4) for pmx.dynamic_batching.KeyValueCache, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MESSAGES)
def test_key_value_cache_says(change: dict[str, object], message: str) -> None:
    with pytest.raises(KVError) as raised:
        pmx.dynamic_batching.key_value_cache(**{**good_call(PAGES), **change})
    assert str(raised.value) == message


def test_attention_over_packed_keys_says_which_sequence_is_too_short() -> None:
    new: Tensor = torch.zeros(2, 1, 4)
    with pytest.raises(KVError) as raised:
        pmx.dynamic_batching.multi_head_attention(
            new, new[:1], new[:1], ints(0, 2), ints(0, 1), 0, 2, 1, num_heads=1, head_dim=4, is_causal=True
        )
    assert str(raised.value) == "kvstarts must give sequence 0 at least its 2 new tokens, got 1"
