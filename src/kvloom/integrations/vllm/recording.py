"""Recording of keys and queries in a forward that does not use vLLM's pages.

Shapes: B rows, T tokens of each, H key/value heads, Hq query heads, D head dim.
"""

import torch
from torch import Tensor

from kvloom import ops
from kvloom.integrations.vllm import layer
from kvloom.integrations.vllm.builder import VllmStep
from kvloom.integrations.vllm.pages import PageFormat


class Recording:
    """Attention metadata of such a forward, shared by all layers; does not import vLLM.

    Args:
        rows: B; each row is a text of its own.
        num_tokens: T.

    Attributes:
        keys: Keys ``[B, H, T, D]`` by the layer that keeps them.
    """

    def __init__(self, rows: int, num_tokens: int) -> None:
        self.keys: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._squares: dict[str, list[Tensor]] = {}
        self._rows, self._num_tokens = rows, num_tokens
        table = torch.arange(rows, dtype=torch.int32)
        lengths = torch.full((rows,), num_tokens, dtype=torch.int32)
        self._step = VllmStep.of(
            torch.arange(rows + 1, dtype=torch.int32) * num_tokens,
            lengths,
            table.unsqueeze(1),
            num_tokens,
            num_tokens=rows * num_tokens,
            max_length=num_tokens,
        )

    def query_power(self, name: str) -> Tensor | None:
        """Mean squares ``[Hq, D]`` float32 of the queries that read the keys of a layer; ``None`` if none."""
        squares = self._squares.get(name)
        return torch.stack(squares).mean(0) if squares else None

    def attend(
        self, name: str, scores: ops.Scores, query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        """Causal attention of one layer.

        Args:
            name: Name of the layer that keeps the keys, which may be another layer.
            scores: Options of the scores of the layer that attends.
            query: ``[B * T, Hq, D]``, as ``out``.
            key: ``[B * T, H, D]``; ignored if the keys of ``name`` are already recorded.
            value: As ``key``.
            out: Result, written.
        """
        if name not in self.keys:
            kept = (x.unflatten(0, (self._rows, self._num_tokens)).transpose(1, 2) for x in (key, value))
            self.keys[name], self._values[name] = (x.contiguous() for x in kept)
        of_first = query[: self._num_tokens].float().square()
        self._squares.setdefault(name, []).append(of_first.mean(0))
        key, value = self.keys[name], self._values[name]
        memory = torch.zeros(*key.shape[:3], 2 * key.shape[3], dtype=key.dtype)
        view = PageFormat.heads(key.shape[3], key.dtype, None).view(memory)
        slots = torch.arange(self._rows * self._num_tokens)
        in_rows = [x.transpose(1, 2).flatten(0, 1) for x in (key, value)]
        layer.store_in_pages(in_rows[0], in_rows[1], slots, view)
        layer.attend_to_pages(query, view, self._step, scores, out)
