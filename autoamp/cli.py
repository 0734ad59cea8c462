"""The command `autoamp`, by the name that installations made before know it by."""

from autoamp_cli import main

__all__ = ["main"]
