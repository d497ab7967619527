"""What a call is: its tensors, where it stands in a sampling, what it has in common with calls of the same plan."""
