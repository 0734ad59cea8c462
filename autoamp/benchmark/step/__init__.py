"""One step of a model: the work, the ways to run it, and a copy that runs one."""
