"""``Cache.update`` of transformers: its results at each step, for each kind of layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvloom.conform.oracles.paged import words


def cache_update(
    key_states: list[Tensor], value_states: list[Tensor], kind: str = "dynamic", max_length: int = 0
) -> dict[str, Tensor]:
    """Keys and values that each update returns, ``keys.0`` and so on.

    ``dynamic`` returns all tokens so far, ``static`` storage of ``max_length`` with zeros at the end,
    ``sliding`` the last ``max_length - 1`` earlier tokens and the new ones.
    """
    found = {}
    for name, states in (("keys", key_states), ("values", value_states)):
        rows: list[Tensor] = []  # of each token, [B, H, D]
        for step, new in enumerate(states):
            if kind == "sliding":
                rows = rows[max(0, len(rows) - (max_length - 1)) :]
            rows += [new[:, :, t] for t in range(new.shape[2])]
            shown = list(rows)
            if kind == "static":
                shown += [torch.zeros_like(rows[0])] * (max_length - len(rows))
            found[f"{name}.{step}"] = torch.stack([words(row) for row in shown], dim=2).view(new.dtype)
    return found
