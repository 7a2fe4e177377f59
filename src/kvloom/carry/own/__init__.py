"""Caches of this library as a ``CarriedCache``, and back."""
