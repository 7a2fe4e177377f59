"""Simulation: traces of requests, replayed through caches of any capacity and policy. Imports no torch."""
