"""Dynamic block sparsity: which key blocks matter least to a call, and how many each head can do without."""
