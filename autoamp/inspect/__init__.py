"""What was done to a model, for people to read."""
