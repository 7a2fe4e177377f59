"""``KVCache``: the cache of ``generate()``, its layers and changes."""

from kvloom.integrations.transformers.cache.kv_cache import KVCache

__all__ = ["KVCache"]
