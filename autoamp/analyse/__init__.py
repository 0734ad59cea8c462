"""From a captured model to facts and categories.  Nothing here changes a graph."""
