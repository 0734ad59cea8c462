"""The command `autoamp`: a group of commands, one file each.

`--help` and shell completion should answer at once, and to import torch takes seconds.
So each command imports what it needs when it runs.
"""

from __future__ import annotations

import click

from autoamp_cli.bench import bench
from autoamp_cli.calibrate import calibrate
from autoamp_cli.commands import Commands
from autoamp_cli.compare import compare
from autoamp_cli.diff import diff
from autoamp_cli.env import env
from autoamp_cli.explain import explain
from autoamp_cli.export import export
from autoamp_cli.rules import rules
from autoamp_cli.run import run

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=Commands, context_settings=_SETTINGS)
@click.version_option(package_name="autoamp")
def main() -> None:
    """Automatic mixed precision for PyTorch."""


_COMMANDS: tuple[click.Command, ...] = (
    bench,
    calibrate,
    compare,
    diff,
    env,
    explain,
    export,
    rules,
    run,
)
for _command in _COMMANDS:
    main.add_command(_command)
