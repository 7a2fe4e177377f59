"""Measures what a kind of cache costs a model: bytes, speed, predictions; and commands that run a model."""
