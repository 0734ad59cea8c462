"""Parts of a report that are computed from its rows when somebody asks for them."""
