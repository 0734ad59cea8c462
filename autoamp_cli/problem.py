"""The error that ends a command because of its input."""

from __future__ import annotations

import click


class Problem(click.ClickException):
    """Bad input: the message goes to stderr, and the exit status is 2."""

    exit_code = 2
