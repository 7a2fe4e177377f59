"""Drafts: tokens that are guessed, and verified by the step that computes them."""
