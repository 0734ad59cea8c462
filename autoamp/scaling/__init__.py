"""Loss scaling: scales gradients at a graph's edge, and finds overflows."""
