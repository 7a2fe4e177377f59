"""kvloom in Hugging Face transformers: caches, attention, pools and continuous batching.

Importing this registers ``attn_implementation="kvloom"``.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from kvloom.core.spelling import STORAGE
from kvloom.integrations.transformers import versions  # noqa: F401 (first: refuses what is not supported)
from kvloom.integrations.transformers.attention.in_place import IMPLEMENTATION, attention
from kvloom.integrations.transformers.attention.masks import attention_mask
from kvloom.integrations.transformers.cache.encoder_decoder import EncoderDecoderKVCache
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer
from kvloom.integrations.transformers.enabling import disable, enable
from kvloom.integrations.transformers.invariance import LayerReport, report_layers
from kvloom.integrations.transformers.models.content import content_of
from kvloom.integrations.transformers.models.loading import Streamer, load_model, summary_of
from kvloom.integrations.transformers.models.text_config import head_dim_of
from kvloom.integrations.transformers.pool.kv_pool import KVPool
from kvloom.integrations.transformers.session import continuous_batching

AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)

__all__ = [
    "STORAGE",
    "EncoderDecoderKVCache",
    "KVCache",
    "KVCacheLayer",
    "KVPool",
    "LayerReport",
    "Streamer",
    "content_of",
    "continuous_batching",
    "disable",
    "enable",
    "head_dim_of",
    "load_model",
    "report_layers",
    "summary_of",
]
