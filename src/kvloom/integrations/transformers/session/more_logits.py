"""``MoreLogits``: a model in a step of a session, with logits that transformers does not ask for.

Shapes: M tokens whose logits are asked for beside transformers' own, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvloom.integrations.transformers.stand_in import StandIn


class MoreLogits(StandIn):
    """A model whose forward may be asked for more logits."""

    def forward_with(self, more: Sequence[int], inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The model's output as transformers asked for it, and logits ``[M, V]`` of more tokens.

        Args:
            more: Indices of these tokens among those of the step.
            inputs: Arguments of the forward; without ``logits_to_keep`` the model computes all logits.
        """
        kept = inputs.get("logits_to_keep")
        if kept is not None:
            inputs["logits_to_keep"] = torch.cat([kept, kept.new_tensor(more)])
        output = self._model(**inputs)
        if kept is None:
            return output, output.logits[0, more]
        logits = output.logits
        output.logits = logits[:, : len(kept)]
        return output, logits[0, len(kept) :]
