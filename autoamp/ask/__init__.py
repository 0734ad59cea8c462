"""Answers questions about a model by running it on inputs, without changing it."""
