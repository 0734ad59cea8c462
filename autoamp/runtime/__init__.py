"""A converted model: its calls, their capture, and the graphs that run."""
