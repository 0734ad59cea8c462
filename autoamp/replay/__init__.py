"""`autoamp replay`: runs the deadly step of a recorded training again, and says why."""
