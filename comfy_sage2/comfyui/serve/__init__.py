"""Serving the calls of one node."""
