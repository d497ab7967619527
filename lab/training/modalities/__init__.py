"""Trains the paper's other modalities at a small size: a language model and an image classifier."""
