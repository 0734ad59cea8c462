"""Ranks: who reduces gradients with whom, and gathers parameters from whom."""
