"""Puts the pass to work on a live model: capture, weight copies, convert and revert."""
