"""Wrappers that restore settings that vLLM's CPU platform changes for models with latent attention (MLA).

vLLM's kernel without AMX has blocks of 16 tokens, and does not read the context of a prompt. So the platform
sets the block size, and turns off prefix caching and chunked prefill; since 0.33 it refuses quantized pages.
It does so before it asks a backend, and has no hook afterwards, so two of its methods are wrapped.
"""

import functools
from typing import Any, Final

_MARK: Final = "_kvloom_gives_back"
_DEFAULT_BLOCK: Final = 128
"""Default block size of vLLM's CPU platform, for all other attention."""


def give_back(platform: Any) -> None:
    """Wrap ``check_and_update_config`` and ``get_attn_backend_cls`` of a class of platforms, once.

    Args:
        platform: vLLM's ``CpuPlatform``, or a subclass of it.
    """
    original, choose = platform.check_and_update_config.__func__, platform.get_attn_backend_cls.__func__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefixes, size = cache.enable_prefix_caching, cache.block_size
        original(cls, vllm_config)
        if not are_kvloom(vllm_config):
            return
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
        cache.enable_prefix_caching = prefixes
        cache.block_size = size if cache.user_specified_block_size else _DEFAULT_BLOCK

    @functools.wraps(choose)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        from kvloom.integrations.vllm.options import CODES

        asked = attn_selector_config
        if asked.use_mla and asked.kv_cache_dtype in CODES:  # the layer supports them, or raises
            asked = asked._replace(kv_cache_dtype="auto")
        return choose(cls, selected_backend, asked, num_heads)

    setattr(check_and_update_config, _MARK, True)
    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def are_kvloom(vllm_config: Any) -> bool:
    """Whether an engine keeps latents in kvloom's pages.

    Args:
        vllm_config: Configuration of the engine.

    Raises:
        ConfigError: its kvloom options are invalid.
    """
    from kvloom.core.entries import FLOATS
    from kvloom.integrations.vllm.options import CODES, Options

    model, kind = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    if model is None or not model.use_mla or getattr(model.hf_config, "model_type", "") == "deepseek_v4":
        return False
    is_float = kind in ("auto", *FLOATS)
    asked = Options.of(vllm_config.additional_config)
    return kind in CODES or (is_float and asked.float is True)
