"""Modes in which no op of a model runs low: their calls run the model's own code."""

from __future__ import annotations

from typing import Any

import torch

_LARGER = 4
"""A call with this many times the elements is captured: low precision may pay in it."""

_LONGEST = 1023
"""The size of a call is looked at after at most this many calls."""


class Rest:
    """One mode of a model, after a capture in which all ops stayed fp32.

    Calls then run the model's own code, without the guards of a graph.  Only at calls
    1, 3, 7, 15, … after the capture the size of the arguments is looked at.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Args: the arguments of the call that was captured."""
        self._size = _elements((args, kwargs))
        self._left = self._since = 0

    def is_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments should be captured anew."""
        if self._left:
            self._left -= 1
            return False
        self._left = self._since = min(2 * self._since + 1, _LONGEST)
        return _elements((args, kwargs)) >= _LARGER * max(self._size, 1)


def _elements(given: Any) -> int:
    """The elements of all tensors in arguments, which may be nested."""
    if isinstance(given, torch.Tensor):
        return given.numel()
    if isinstance(given, dict):
        given = [*given.values()]
    if isinstance(given, tuple | list):
        return sum(map(_elements, given))
    return 0
