"""Measurements of kinds of caches on a model: bytes, speed, predictions; and commands that run a model."""
