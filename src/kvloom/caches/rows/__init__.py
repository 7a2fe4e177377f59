"""Rows of a batch in pages: who holds which page, and the slots of every token."""
