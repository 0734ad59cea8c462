"""What was decided and why, as text, as JSON and as a page."""
