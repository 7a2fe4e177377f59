"""Slow, independent implementations that the tests compare the library with."""
