"""Latent attention (MLA) in vLLM: backends, guards, steps, and settings of the platform."""
