"""Timing the attentions on a GPU."""
