"""Checks every edit of a graph, by code that shares nothing with the passes."""
