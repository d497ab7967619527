"""What is known of the times of a GPU, and what follows from it."""
