"""Keeps the compiled code of one method of a model, and compiles it anew if needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import nn

from autoamp.capture.alike import likeness
from autoamp.capture.engine import Engine
from autoamp.capture.program import Program, program_for

_RECOMPILE_LIMIT = 8
"""Dynamo's recompile limit per code object, which as many new graphs may have hit."""

_MOST_COMPILATIONS = 8
"""How many compilations of a method there may be before `start_afresh` adds no more."""


class Method(NamedTuple):
    """A method that calls of a model run, `forward` or another one, and its code.

    Attributes:
        name: the method's name.
        entry: gives the method as a function of the model, with code objects of its
            own.
        shared: a key of the method's code, equal for models of one class; None where
            the instance has a method of its own.
    """

    name: str
    entry: Callable[[], Callable[..., Any]]
    shared: Hashable | None = None


class Code:
    """The compiled code of one method.

    Attributes:
        program: the method compiled by Dynamo; None before the first call.
        called_modes: grad mode, inference mode and training, as in the method's calls
            so far.
        hooked: whether modules have hooks that guards must look at.
    """

    def __init__(self, method: Method, engine: Engine) -> None:
        self.program: Program | None = None
        self.called_modes: set[tuple[bool, bool, bool]] = set()
        self.hooked = False
        self._method = method
        self._engine = engine
        self._compilations = 0
        self._graphs_before = 0

    @functools.cached_property  # few calls need it
    def entry(self) -> Callable[..., Any]:
        """The method as a function of the model, not compiled."""
        return self._method.entry()

    def joined(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program:
        """The program shared by all models like this one, taken at its first call."""
        what = self._method.shared
        if what is not None:
            like = likeness(model, args, kwargs)
            what = None if like is None else (what, like)
        entry, engine = self._method.entry, self._engine
        return self._begin(program_for(what, entry, engine, hooked=self.hooked))

    def compile(self) -> Program:
        """A new program for this model alone, whatever models like it share."""
        entry = self._method.entry()
        return self._begin(Program(entry, self._engine, hooked=self.hooked))

    def renew(self, method: Method) -> None:
        """Makes `method` the code that is compiled from now on."""
        self._method = method
        self.__dict__.pop("entry", None)
        self.called_modes.clear()
        self.program = None

    def start_afresh(self) -> None:
        """Compiles the method anew, at most until `_MOST_COMPILATIONS` are made.

        Dynamo never looks again at code it once stepped aside from: without new code,
        one call under a FlopCounterMode would leave the model in fp32 for good.  At the
        recompile limit nothing is compiled, because new code would only reach the limit
        again.
        """
        if self._compilations < _MOST_COMPILATIONS and not self.has_many:
            self.compile()
            self.called_modes.clear()

    @property
    def has_many(self) -> bool:
        """Whether so many graphs were captured that Dynamo may make no more."""
        made = len(self._engine.record.graphs) - self._graphs_before
        return made >= _RECOMPILE_LIMIT

    def _begin(self, program: Program) -> Program:
        self.program = program
        self._compilations += 1
        self._graphs_before = len(self._engine.record.graphs)
        return program
