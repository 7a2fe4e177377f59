"""What a model's configuration says of its text."""

from typing import Any

from transformers import PretrainedConfig

from kvloom.errors import ArgumentError


def text_config_of(model: Any) -> Any:
    """The configuration of the part that generates text.

    Raises:
        ArgumentError: ``model`` is none.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        got = (
            f"the configuration {type(model).__name__}"
            if isinstance(model, PretrainedConfig)
            else repr(model)
        )
        raise ArgumentError(f"model must be a PreTrainedModel, got {got}")
    return config.get_text_config(decoder=True)


def head_dim_of(config: Any) -> int:
    """Elements of a head vector of a text model, which not every configuration states."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def head_dims_of(config: Any) -> tuple[int, int] | None:
    """Elements of a head vector of the keys and of the values that a cache gets.

    ``None`` without attention, and with latent vectors: whether they are cached as they are or expanded,
    transformers' version says.
    """
    has_heads = getattr(config, "head_dim", None) or getattr(config, "num_attention_heads", None)
    if names_rank(config) or not has_heads:
        return None
    return head_dim_of(config), head_dim_of(config)


def names_rank(config: Any) -> bool:
    """Whether a configuration is of latent attention; some refuse to name the rank of all layers."""
    return "kv_lora_rank" in vars(config) or hasattr(type(config), "kv_lora_rank")
