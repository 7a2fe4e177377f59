"""Nothing here is collected where transformers has no continuous batching that this library serves."""

from __future__ import annotations

from oracles.batching import HAS_SESSIONS

collect_ignore_glob = [] if HAS_SESSIONS else ["test_*.py"]
"""Families, experts and sessions are those of newer versions."""
