"""Weights in two precisions: low copies that graphs read, fp32 masters of half ones."""
