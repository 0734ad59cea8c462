"""The line on a model that was not hot, where its program or a notebook's cell ends.

A program in which no model is captured says the line, too: of the package no more is
imported here than `heat` needs.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any

from autoamp.auto.heat import LEAST, Heat
from autoamp_said import say


class ColdLine:
    """Says once of a model that it ran as it is.

    The line comes at exit, or after the notebook's cell in which the model has
    computed: the process of a notebook does not exit.

    Args:
        heat: the counts of the calls.
        remedy: the setting with which models are captured at their first call.
    """

    def __init__(self, heat: Heat, remedy: str) -> None:
        self.heat, self._remedy = heat, remedy
        self._process = os.getpid()  # a fork of the process has the same records
        self._shell: Any = None
        heat.on_count = self._listen
        atexit.register(self.say)

    def say(self, *_: object) -> None:
        """Says which model stayed as it was: none was hot, or it has trained."""
        nearest = self.heat.nearest()
        if nearest is None or self._process != os.getpid():
            return
        module = nearest.module()
        if self.heat.has_met and not nearest.steps:
            return
        if module is not None and "_autoamp" in module.__dict__:
            return  # a part of a captured model, or converted by the script
        self.heat.settle()
        why = (
            f"its calls are predicted to take {nearest.spent:.2g} s, and its capture "
            f"{nearest.cost:.2g} s"
        )
        if nearest.is_short:
            why = (
                f"a call is predicted to take {1e3 * nearest.seconds:.2g} ms, and one "
                f"below {1e3 * LEAST[nearest.trained]:g} ms gains nothing"
            )
        say(
            logging.INFO,
            f"autoamp: {nearest.name} ran as it is: {why}. {self._remedy} captures "
            "models at their first call",
        )

    def end(self) -> None:
        """Says what is to be said, and listens no longer."""
        self.say()
        atexit.unregister(self.say)
        self.heat.on_count = None
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self.say)

    def _listen(self) -> None:
        """Listens to the ends of cells, where the program is a notebook by now."""
        shell_of: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
        if self._shell is None and shell_of is not None:
            self._shell = shell_of()
            if self._shell is not None:
                self._shell.events.register("post_run_cell", self.say)
