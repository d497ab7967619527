"""The demo: one caption sampled in full precision, precise, 8b and 4b, with the results side by side."""
