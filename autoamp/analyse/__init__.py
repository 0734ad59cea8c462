"""From an ATen graph to facts and verdicts.  Nothing here changes a graph."""
