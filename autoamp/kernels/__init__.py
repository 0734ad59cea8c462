"""Chains of ops that torch has one kernel for: found by their numbers, and replaced."""
