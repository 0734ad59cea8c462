"""Parts of a report that are computed from its rows on demand."""
