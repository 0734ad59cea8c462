"""Chains of ops that one kernel computes: found, proved and tried, and attention."""
