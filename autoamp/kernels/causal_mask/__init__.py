"""Attention whose mask is the causal one, or hides no key, needs no mask."""
