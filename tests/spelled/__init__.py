"""Layers as libraries write them, on hostile data, held to the accuracy law.

`python -m tests.spelled --help` runs the sweep; `measure` says what is compared.
"""
