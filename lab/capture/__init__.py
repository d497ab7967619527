"""Attention calls kept for measuring: what one is, how they are recorded within bounds, and their file."""
