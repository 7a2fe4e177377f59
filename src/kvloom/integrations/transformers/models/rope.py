"""RoPE whose frequencies depend on the length of a text."""

from typing import Any

from torch import nn


class DynamicRope:
    """Names of the frequencies of forwards, by the position of the last token.

    transformers chooses them in each forward, for all of its tokens: ``longrope`` has two sets, and
    ``dynamic`` has a set for each length beyond the trained one.

    Args:
        limit: Number of tokens up to which a text has the trained frequencies.
        has_long: Whether all longer texts have the same frequencies.
    """

    def __init__(self, limit: int, has_long: bool) -> None:
        self.limit, self.has_long = limit, has_long

    def frequencies(self, num_tokens: int) -> str | None:
        """Name of the frequencies of a forward of this length; ``None`` if each length has its own."""
        if num_tokens <= self.limit:
            return ""
        return "long" if self.has_long else None

    @property
    def why_alone(self) -> str:
        """Why the pages of a text that grew longer than ``limit`` are not shared."""
        if not self.has_long:
            return f"each length of more than {self.limit} tokens has its own RoPE frequencies in this model"
        return (
            f"the text grew to more than {self.limit} tokens, which have other RoPE frequencies in this "
            f"model, so its first and last tokens do not fit together; a prompt of more tokens is shared"
        )


def has_dynamic_rope(module: nn.Module) -> bool:
    """Whether a module computes rotary embeddings whose frequencies depend on positions."""
    return any(_is_dynamic(kind) for kind in _kinds(module).values())


def dynamic_rope(model: nn.Module) -> DynamicRope | None:
    """The dynamic RoPE of a model; ``None`` if its frequencies are always the same."""
    limits, are_long = [], []
    for module in model.modules():
        for layer_type, kind in _kinds(module).items():
            if _is_dynamic(kind):
                limits.append(_limit(module, layer_type, kind))
                are_long.append(kind == "longrope")
    return DynamicRope(min(limits), all(are_long) and len(set(limits)) == 1) if limits else None


def _kinds(module: nn.Module) -> dict[str | None, str]:
    """Kinds of RoPE of a module, by layer type if there are several."""
    kinds = vars(module).get("rope_type")
    named = kinds if isinstance(kinds, dict) else {None: kinds}
    return {name: kind for name, kind in named.items() if isinstance(kind, str)}


def _is_dynamic(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _limit(module: Any, layer_type: str | None, kind: str) -> int:
    config = module.config
    if kind != "longrope":
        # At exactly the trained length the frequencies of an earlier longer text are kept.
        return int(getattr(module, "original_max_seq_len", config.max_position_embeddings)) - 1
    said = getattr(config, "rope_parameters", None) or {}
    said = said.get(layer_type, said) if layer_type is not None else said
    limit = said.get("original_max_position_embeddings")
    return int(
        limit or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    )
