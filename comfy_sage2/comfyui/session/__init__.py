"""One node at work on one model: who computes each call, what watches over it, and the record of what happened."""
