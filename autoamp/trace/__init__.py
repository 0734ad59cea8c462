"""Any FX graph becomes one ATen graph: traced, or spelled from Dynamo's results."""
