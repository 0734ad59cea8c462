"""Compares two recorded trainings: the first step at which they part."""
