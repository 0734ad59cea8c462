"""Passes that decide: a verdict and a price for each op, and the cheapest placement."""
