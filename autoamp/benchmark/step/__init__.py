"""One step of a model: its work, the ways to run it, a copy that runs one way."""
