"""Holds no test any more: tests/repository/test_layering.py has the layers."""
