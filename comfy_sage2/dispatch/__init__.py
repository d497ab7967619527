"""Which backend serves a call, and torch operators that run it."""
