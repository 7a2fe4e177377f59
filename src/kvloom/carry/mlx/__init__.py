"""Prompt caches of mlx-lm."""
