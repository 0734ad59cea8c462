"""Loss scaling: where gradients are scaled in a graph, and what overflowed."""
