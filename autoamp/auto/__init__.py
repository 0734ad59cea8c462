"""The automatic mode: every model a process calls is converted at its first call."""
