"""How each request of a session chooses its tokens."""
