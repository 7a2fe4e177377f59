"""Oracles: slow, obvious implementations from the documents alone, without the library's kernels."""
