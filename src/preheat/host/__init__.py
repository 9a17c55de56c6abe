"""One machine: a supervisor process, and the workers that answer requests."""
