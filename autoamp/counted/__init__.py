"""Counts what a call of a model runs: casts, flops, bytes moved and saved."""
