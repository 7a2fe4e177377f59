"""Layers of a cache: what ``update`` and ``append`` do, over pages and in storage that never moves."""
