"""Answers to requests: prompts become tokens in threads, sessions compute tokens, tokens become text."""
