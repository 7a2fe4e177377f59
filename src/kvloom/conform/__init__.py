"""Conformance vectors, a runner and reports for implementations of these operators."""
