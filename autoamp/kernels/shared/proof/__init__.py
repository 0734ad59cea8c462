"""Proves that a chain of calls is a kernel: by algebra that holds for all numbers."""
