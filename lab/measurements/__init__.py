"""Sparse calls, and what the node chooses."""
