"""Measurements: sparse calls, the node's choices, memory, and the host's time."""
