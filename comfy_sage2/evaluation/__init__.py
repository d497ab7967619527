"""`python -m comfy_sage2 eval`: how close quantised attention is to full precision, in tensors and in videos."""
