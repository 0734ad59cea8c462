"""Every error this package raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable

from autoamp.messages import printable

_MOST = 4000
"""The most characters that a message shows."""


class AutoampError(Exception):
    """The base class of every error that autoamp raises on purpose.

    The message says what went wrong, where (module path, op, source line) and what
    to do about it.  The message may quote anything that a user or a file holds.

    Attributes:
        nodes: names of the graph nodes that the error is about, if any.
    """

    def __init__(self, *args: object, nodes: Iterable[str] = ()) -> None:
        super().__init__(*args)
        self.nodes = tuple(nodes)

    def __str__(self) -> str:
        return printable(super().__str__(), _MOST)


class OptionError(AutoampError, ValueError):
    """An option of `convert` or `rewrite` has an unusable value."""


class RulesError(AutoampError, ValueError):
    """A rules file or a user's rule is malformed, unknown or contradictory."""


class UnsupportedModelError(AutoampError, TypeError):
    """The given object cannot be converted: no module, quantised, on meta, ..."""


class CaptureError(AutoampError, RuntimeError):
    """The model could not be captured as a graph, or a call ran no rewritten graph."""


class PlacementError(AutoampError, RuntimeError):
    """Constraints on precision contradict each other; the message is their chain."""


class VerificationError(AutoampError, RuntimeError):
    """A rewritten graph is not legal, or its cost is not the predicted cost."""


class PassError(AutoampError, RuntimeError):
    """A pass failed on one node of a graph."""

    @classmethod
    def at(cls, node: str, error: Exception) -> AutoampError:
        """`error`, which a pass met at `node`, as an error that names the node."""
        if isinstance(error, AutoampError):
            error.nodes = error.nodes or (node,)
            return error
        return cls(f"at {node}: {type(error).__name__}: {error}", nodes=(node,))


class ExportError(AutoampError, RuntimeError):
    """A model cannot be exported, or an exported file does not hold its own plan."""


class LossScaleError(AutoampError, ValueError):
    """A loss scale is unusable, its state does not fit, or it reached its floor."""


class RankError(AutoampError, RuntimeError):
    """Ranks of one training run a model in different ways, or one of them has left."""


class CheckpointError(AutoampError, ValueError):
    """The saved state of an optimizer does not fit the optimizer that loads it."""
