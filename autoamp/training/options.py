"""The options of `convert`: those of the passes, and those of calls and training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from autoamp import compat
from autoamp.dtypes import UNSCALED
from autoamp.messages import log_once
from autoamp.passes.options import (
    Backend,
    PassOptions,
    RewriteOptions,
    choice,
    names_of,
    switch,
)
from autoamp.training.scale import (
    LOSS_SCALES,
    LossScale,
    LossScaleName,
    resolve_loss_scale,
)

logger = logging.getLogger(__name__)

WeightCopies = Literal["kept", "every call"]
Masters = Literal["auto", "split", "fp32", "off"]

WEIGHT_COPIES: tuple[str, ...] = get_args(WeightCopies)
MASTERS: tuple[str, ...] = get_args(Masters)


class ConvertOptions(RewriteOptions, total=False):
    """Options of `autoamp.convert`, for a dict that type checkers know.

    All functions that take `**options` take these; `autoamp.convert` explains them.  So
    does `options=` of `torch.compile(model, backend="autoamp")`, but torch's own type
    for it is a plain dict, so that a type checker cannot check those options.

    Example:
        >>> options: autoamp.ConvertOptions = {"precision": "bf16", "do_no_harm": False}
        >>> model = autoamp.convert(torch.nn.Linear(64, 64), **options)
        >>> autoamp.is_converted(model)
        True
    """

    loss_scale: LossScaleName | float | LossScale
    backend: Backend | Callable[..., Any]
    weight_copies: WeightCopies
    masters: Masters
    guard: bool
    exact_casts: bool


@dataclass(frozen=True)
class Options(PassOptions):
    """The options a user chose, with the names and defaults of `autoamp.convert`.

    Attributes:
        unmet: the patterns of `keep` that have matched no model yet, if the options are
            for all models of a process.  Only `enable` sets this field.

    Raises:
        OptionError: a value is unusable; the message lists the valid values.
        LossScaleError: `loss_scale` is unusable.
        RulesError: `rules` or an op name is unusable.
    """

    loss_scale: LossScaleName | float | LossScale = "auto"
    weight_copies: WeightCopies = "kept"
    masters: Masters = "auto"
    guard: bool = True
    unmet: set[str] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("weight_copies", self.weight_copies, WEIGHT_COPIES)
        choice("masters", self.masters, MASTERS)
        switch("guard", self.guard)
        if not (isinstance(self.loss_scale, str) and self.loss_scale in LOSS_SCALES):
            resolve_loss_scale(self.loss_scale, UNSCALED)  # any dtype will do

    def compiled_by(self, backend: Callable[..., Any]) -> Options:
        """The options for a compilation of the user's own, by another back end."""
        changes: dict[str, Any] = {"backend": backend}
        if self.exact_casts and not compat.is_inductor(backend):
            log_once(
                logger,
                logging.WARNING,
                f"autoamp: {self.advice('exact_casts', True)} is for inductor; another "
                f"compiler ({backend!r}) rounds as it likes",
            )
            changes["exact_casts"] = False
        return self.replace(**changes)


OPTION_NAMES = names_of(Options)
"""The options that a caller may give."""

NOT_OF_REWRITE = ConvertOptions.__annotations__.keys() - RewriteOptions.__annotations__
"""The options for a model that is called and trained, or compiled here."""
