"""The automatic mode: every model of a process is converted when it is hot."""
