"""The requests of a session: the pages and states that they hold, and how others find these."""
