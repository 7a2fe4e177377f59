"""Commands that measure: each its options, and what it prints."""
