"""`python -m lab eval`: how close quantized attention is to full precision, in tensors and in videos."""
