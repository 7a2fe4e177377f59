"""Vectors, a runner and reports for everyone who implements these operators."""
