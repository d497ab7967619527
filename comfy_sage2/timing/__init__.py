"""Timing every attention that a GPU has, once."""
