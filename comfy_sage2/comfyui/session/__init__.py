"""One node running on one model: the choice of who computes each call, the guard, and the record of a sampling."""
