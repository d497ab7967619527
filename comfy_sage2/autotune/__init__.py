"""Times of the attentions on a GPU as data, what follows from them, and where they are kept. `timing` measures them."""
