"""The ways to compute the attention, one file each."""
