"""The page of a report: one HTML file that needs no network."""
