"""How far inductor is with a graph under `backend="auto"`, noted for the report."""

from __future__ import annotations

from torch import fx

EAGER, COMPILING, COMPILED = "eager", "compiling", "compiled"

_STATE = "autoamp_compiled_later"


def note_state(gm: fx.GraphModule, state: str) -> None:
    """Notes `EAGER`, `COMPILING`, `COMPILED`, or why a graph stays eager."""
    gm.meta[_STATE] = state


def state_of(gm: fx.GraphModule) -> str:
    """The state noted last; "" where the graph is not to be compiled later."""
    return str(gm.meta.get(_STATE, ""))
