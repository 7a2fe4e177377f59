"""Memory of a model and its cache, from a configuration alone, before anything is allocated."""
