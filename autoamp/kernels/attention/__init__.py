"""Attention that is written out becomes one call of `autoamp::attention`, on CPUs."""
