"""Any FX graph becomes one ATen graph: traced, or spelled where Dynamo's results do."""
