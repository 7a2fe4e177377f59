"""Attention in Triton: a plan of the work, tiles of it, and the merge of what was split."""
