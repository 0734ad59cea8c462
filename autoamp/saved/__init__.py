"""Reads reports back from files, and compares them."""
