"""The options of `convert`: those of the passes, and those of calls and training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

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
from autoamp_said import logger_of

logger = logger_of(__name__)

WeightCopies = Literal["kept", "every call"]
Masters = Literal["auto", "split", "fp32", "off"]

WEIGHT_COPIES: tuple[str, ...] = get_args(WeightCopies)
MASTERS: tuple[str, ...] = get_args(Masters)


class ExpertOptions(TypedDict, total=False):
    """Options of `autoamp.convert` that few users need.

    Attributes:
        fuse: True: a chain of calls that torch has one kernel for runs as that kernel
            (a GELU or a norm written out), which computes in fp32 inside.
            `{"gelu": False}` switches single kernels off (docs/kernels.md names them).
        guard: True: steps with infinite or NaN gradients are skipped, in bf16 too.
        weight_copies: "kept": a weight's low-precision copy that several calls read is
            kept until the weight is written to, through torch or through an object that
            shares its memory, such as a NumPy array.  A write through a bare address
            taken earlier goes unseen (C code with `w.data_ptr()`, a replayed CUDA
            graph), and a write by torch may move the weight away from that address.
            "every call": each weight is copied at each call, and never moved.
        exact_casts: whether the kernels of inductor round at each cast, as the graph
            does where it runs as it is; by default a value that is cast and read inside
            one kernel stays fp32 there.  "eager" rounds in any case; with another
            compiler than inductor the option is refused.
        calibrate: True: ops are priced by speeds measured on this machine. The first
            call measures them in half a second, once for a device and a number of
            threads, and they are kept on disk (docs/platforms.md).  False takes the
            figures of a table, as `AUTOAMP_CALIBRATE=0` does.

    Example:
        >>> options: autoamp.ExpertOptions = {"fuse": {"gelu": False}, "guard": False}
        >>> model = autoamp.convert(torch.nn.Linear(64, 64), **options)
        >>> autoamp.is_converted(model)
        True
    """

    fuse: bool | Mapping[str, bool]
    guard: bool
    weight_copies: WeightCopies
    exact_casts: bool
    calibrate: bool


class ConvertOptions(RewriteOptions, ExpertOptions, total=False):
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
    masters: Masters


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

    def compiled_by(self, backend: str | Callable[..., Any]) -> Options:
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
