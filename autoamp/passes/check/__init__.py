"""Checks of each pass, which share no code with the passes."""
