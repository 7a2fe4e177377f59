"""PMX/OPMX operators with the names, order and defaults of their documents.

``key_value_cache`` is ``pmx.KeyValueCache``; ``dynamic_batching`` holds the operators of that domain. Only
``cache`` and ``scale`` are written in place.
"""

from kvloom.dialects.pmx import dynamic_batching
from kvloom.dialects.pmx.static import key_value_cache

__all__ = ["dynamic_batching", "key_value_cache"]
