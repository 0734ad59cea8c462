"""Modules that apply an assignment, clean up and verify; none decides a precision."""
