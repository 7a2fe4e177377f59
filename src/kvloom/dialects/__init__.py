"""Operator standards: each checks arguments by its own document, translates, and calls ``kvloom.ops``."""
