"""`autoamp.bench`: times the ways to run a model, and counts what each way costs."""
