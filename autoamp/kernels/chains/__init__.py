"""Chains of calls that torch has one kernel for: one row each of `kernels/table.py`."""
