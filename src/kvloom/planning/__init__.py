"""Planning: memory of a model and its cache, from its configuration, before any allocation."""
