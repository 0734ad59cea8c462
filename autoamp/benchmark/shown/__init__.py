"""A `Bench` as tables and as a plot."""
