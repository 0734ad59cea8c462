"""Passes that see: the graph in torch's own ops, and the facts of each value."""
