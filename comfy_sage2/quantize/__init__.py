"""Section 3 of the SageAttention2 paper (arXiv 2411.10958) in plain PyTorch, one idea a file."""
