"""Checks of each pass, which share no code with the passes that decide or write.

With the passes that see, they share how one node is read (`see/nodes.py`), and the
names of the calls that have graphs of their own or compute on DTensors.
"""
