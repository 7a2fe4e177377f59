"""Doors to other libraries, a folder for each."""
