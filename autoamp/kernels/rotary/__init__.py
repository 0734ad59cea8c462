"""A rotary position embedding that is written out becomes one call."""
