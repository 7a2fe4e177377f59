"""Each operator once more: slow, obvious, from its document alone, without the library's kernels."""
