"""How close quantized attention is to full precision, in tensors and in videos."""
