"""Ranks: which of them reduce gradients together, and gather parameters."""
