"""Stores below vLLM: plans of the scheduler, moves of a worker, and the identity of a model."""
