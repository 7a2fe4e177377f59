"""kvloom inside vLLM's CPU engine: attention over int8, int4 and float pages."""
