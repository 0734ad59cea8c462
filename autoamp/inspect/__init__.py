"""Reports of the changes made to a model, for people and for programs to read."""
