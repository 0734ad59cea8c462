"""Passes that write: casts, weight copies, loss scaling and layouts go into graphs."""
