"""Weights in two precisions: low copies for graphs, made anew after a step."""
