"""Recordings of page events: files, results of each request, and an HTML page. Imports no torch."""
