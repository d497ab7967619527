"""Times of the attentions on a GPU: how they are measured, what follows from them, and where they are kept."""
