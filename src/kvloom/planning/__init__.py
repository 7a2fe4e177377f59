"""Planning: memory of a model and its cache, from a configuration alone, before any allocation."""
