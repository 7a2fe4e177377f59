"""What a model and its cache take, before anything is allocated; from a configuration alone."""
