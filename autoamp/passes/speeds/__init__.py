"""Speeds of this machine, measured once, from which ops are priced."""
