"""`convert(budget=...)`: the least time within an error that the user states."""
