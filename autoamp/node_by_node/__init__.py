"""Runs a graph node by node."""
