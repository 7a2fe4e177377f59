"""Endpoints of the server, by their subject."""
