"""What several kernels share: algebra, positions, constants, and what calls allow."""
