"""Dynamic block sparsity: key blocks of next to no probability are found in some steps and skipped in the others."""
