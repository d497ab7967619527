"""Leaving out key tiles of next to no probability, by lists that are made in some steps and used in the others."""
