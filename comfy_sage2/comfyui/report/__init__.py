"""What happened during a sampling: the record, in words and as a picture."""
