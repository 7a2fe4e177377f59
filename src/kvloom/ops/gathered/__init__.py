"""Attention of many new tokens over keys and values that are gathered for it."""
