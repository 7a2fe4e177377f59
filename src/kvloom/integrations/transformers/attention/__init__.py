"""Attention that reads a cache in place, its masks and its latents."""

from kvloom.integrations.transformers.attention.in_place import IMPLEMENTATION, attention

__all__ = ["IMPLEMENTATION", "attention"]
