"""Nothing here is collected where transformers has no continuous batching that this library serves."""

from __future__ import annotations

from kvloom.integrations.transformers.versions import IS_4

collect_ignore_glob = ["*test_*.py"] if IS_4 else []
