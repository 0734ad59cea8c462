"""Optimizer steps: skipped at an overflow, taken with fp32 masters, with closures."""
