"""Times every attention of a GPU, once."""
