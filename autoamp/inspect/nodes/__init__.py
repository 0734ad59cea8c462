"""The nodes of a graph, each with the module that it is drawn in."""
