"""Passes that write: casts, weight copies, loss scaling and layouts, put into graphs."""
