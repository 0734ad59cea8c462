"""Weights in two precisions: low copies for graphs, fp32 masters of half parameters."""
