"""The demo: one caption sampled in full precision, 8b and 4b, and what came out side by side."""
