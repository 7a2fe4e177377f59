"""kvloom in Hugging Face transformers: caches, attention, pools and continuous batching.

Importing this registers ``attn_implementation="kvloom"``.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from kvloom.core.spelling import STORAGE
from kvloom.integrations.transformers.attention import IMPLEMENTATION, attention
from kvloom.integrations.transformers.batching import continuous_batching
from kvloom.integrations.transformers.cache import KVCache
from kvloom.integrations.transformers.content import content_of
from kvloom.integrations.transformers.enabling import disable, enable
from kvloom.integrations.transformers.invariance import LayerReport, report_layers
from kvloom.integrations.transformers.layers import KVCacheLayer
from kvloom.integrations.transformers.loading import Streamer, load_model, summary_of
from kvloom.integrations.transformers.masks import attention_mask
from kvloom.integrations.transformers.pool import KVPool
from kvloom.integrations.transformers.text_config import head_dim_of

AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)

__all__ = [
    "STORAGE",
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
