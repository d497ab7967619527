"""The node classes."""
