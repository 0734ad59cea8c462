"""`plan(mesh=...)`: predicts a training step on many devices, without any of them."""
