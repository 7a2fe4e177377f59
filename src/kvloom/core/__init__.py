"""Definitions of a cache: axis orders, indices into slots, specifications, canonical views."""
