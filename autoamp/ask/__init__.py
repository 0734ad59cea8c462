"""Questions about a model, answered on inputs of the model, which is not changed."""
