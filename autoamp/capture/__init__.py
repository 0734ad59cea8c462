"""Captures a model's calls as graphs, has them rewritten and runs the results."""
