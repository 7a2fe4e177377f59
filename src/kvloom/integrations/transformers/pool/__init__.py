"""``KVPool``: prefixes that caches of one model share."""

from kvloom.integrations.transformers.pool.kv_pool import KVPool

__all__ = ["KVPool"]
