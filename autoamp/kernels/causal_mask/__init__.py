"""Attention whose mask is the causal one is told so, and needs no mask."""
