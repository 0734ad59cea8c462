"""The modes of a process, which torch reads in every call: autocast, gradients."""
