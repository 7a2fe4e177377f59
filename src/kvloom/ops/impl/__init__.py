"""One module for each backend. Backends never import one another."""
