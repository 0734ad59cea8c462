"""A call of a converted model: through its graphs, or past them."""
