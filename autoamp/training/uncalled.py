"""Tells of a converted model that is trained although no call of it was captured.

`expect_calls` takes a model's scaling at its conversion.  `tell_of_uncalled` is called
before each step.  It warns once, before the first step of the model's weights, if their
gradients come from code that ran past the conversion, in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch.optim import Optimizer

from autoamp.errors import CaptureError
from autoamp.training.boundary import params_of
from autoamp.training.model_scaling import ModelScaling
from autoamp_said import logger_of

logger = logger_of(__name__)


class _Expected(NamedTuple):
    explain: Callable[[ModelScaling], str]
    strict: bool


_expected: weakref.WeakKeyDictionary[ModelScaling, _Expected] = (
    weakref.WeakKeyDictionary()
)
_strangers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = (
    weakref.WeakKeyDictionary()
)
"""Optimizers of no expected model, with the conversions and the groups there were."""

_conversions = [0]


def expect_calls(
    scaling: ModelScaling, explain: Callable[[ModelScaling], str], *, strict: bool
) -> None:
    """Has `tell_of_uncalled` look for calls of the models of `scaling`.

    Args:
        explain: says which calls are captured, and which code runs past them.
        strict: whether an error is raised where there are none.
    """
    _conversions[0] += 1
    _expected[scaling] = _Expected(explain, strict)


def expect_no_calls() -> None:
    """Looks no more for calls of the models there are: a compilation of the user's
    holds the code of one of them, and its calls are not seen."""
    _expected.clear()


def tell_of_uncalled(optimizer: Optimizer, scalings: Iterable[ModelScaling]) -> None:
    """Warns before a step of weights whose model is converted, and was not called.

    Args:
        scalings: the scalings of all conversions.

    Raises:
        CaptureError: there is such a model, and it was converted with `strict`.
    """
    for scaling in [each for each in _expected if each.ledger.called]:
        _expected.pop(scaling, None)
    stamp = _conversions[0], len(optimizer.param_groups)
    if not _expected or _strangers.get(optimizer) == stamp:
        return
    trained = {id(p): p.grad is not None for p in params_of(optimizer)}
    called = [s for s in scalings if s.ledger.called]
    is_stranger = True
    for scaling, expected in list(_expected.items()):
        held = {id(w) for w in scaling.weights} & trained.keys()
        is_stranger = is_stranger and not held
        # A model that was called may hold the weights too, as one around this one.
        held -= {id(w) for each in called for w in each.weights} if held else set()
        if not any(trained[each] for each in held):
            continue
        _expected.pop(scaling)
        text = (
            f"{scaling.label} is converted, but its weights have gradients for a step "
            f"of {type(optimizer).__name__} and no call of it was captured, so that it "
            f"is trained in fp32. {expected.explain(scaling)}"
        )
        if expected.strict:
            raise CaptureError(text)
        logger.warning("autoamp: %s", text)
    if is_stranger:
        _strangers[optimizer] = stamp
