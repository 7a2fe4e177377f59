"""Quantization codes: scales, numbers and bytes."""
