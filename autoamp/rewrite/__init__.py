"""Applies an assignment, tidies up, and checks the result.  Decides nothing."""
