"""Measured speeds: of the device at hand, of single ops, and of whole calls."""
