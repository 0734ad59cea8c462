"""Measures ops, casts and whole steps on the device at hand, for `autoamp.tune`."""
