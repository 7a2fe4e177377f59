"""Recordings of pages: files of events, what became of each request, and a page that shows it. No torch."""
