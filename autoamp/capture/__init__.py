"""A call becomes a graph, and the graph what is run for it."""
