"""`python -m lab eval`: how close quantised attention is to full precision, in tensors and in videos."""
