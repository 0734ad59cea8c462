"""Loss scaling at the edge of a graph."""
