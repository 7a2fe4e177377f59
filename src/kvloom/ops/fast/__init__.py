"""Ways past the checks in Python: kernels that check, and calls like those that were checked."""
