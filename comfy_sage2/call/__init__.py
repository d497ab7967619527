"""A call: its tensors, its place in a sampling, and its signature, which calls of one plan share."""
