"""Any FX graph becomes one ATen graph: traced, or read from Dynamo's results."""
