"""The steps of a session: the requests that each feeds, its attention, and its calls of mixers."""
