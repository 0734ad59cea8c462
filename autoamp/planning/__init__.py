"""`plan`: the time and the memory of a model's step, without its weights."""
