"""One store of a chain: its runs, threads, failures and limits."""
