"""States of llama.cpp: of a sequence, and the files of a sequence and of a context."""
