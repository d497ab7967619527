"""Finding and loading the compiled kernels. Uses neither torch nor pip, and downloads nothing."""
