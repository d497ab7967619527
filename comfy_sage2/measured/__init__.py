"""What was timed on a GPU, and what follows from it."""
