"""Kernels of head vectors outside caches: smoothing and rotation."""
