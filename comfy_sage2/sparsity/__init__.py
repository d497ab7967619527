"""Dynamic block sparsity: which key blocks matter least to a call, and how many of them each head can leave out."""
