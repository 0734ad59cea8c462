"""Code that several kernels share: algebra, positions, constants, conditions."""
