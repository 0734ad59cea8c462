"""The passes: a captured graph in, a graph in mixed precision out (`list.py`)."""
