"""`plan`: predicts the time and the memory of a step, without data for the weights."""
