"""Writes one snapshot when the numbers of a training are not finite any more.

Until then a call with `record=` costs a reference to its arguments and a copy of
torch's generators.  On a CPU the loss is looked at as its backward begins; on a GPU,
where a look waits for the device, at the optimizer's step, or where only a kernel
decides on the step, as the next call begins.
"""

from __future__ import annotations

import functools
import logging
import math
import platform
import random
import time
import weakref
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.training import snapshot_files as files
from autoamp.training.boundary import BOUNDARIES
from autoamp.training.options import OPTION_NAMES, Options
from autoamp.training.recorder import line_outside
from autoamp.training.scaling import ModelScaling

logger = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
"""The most bytes of tensors: they are copied to host memory, and the training waits
some seconds until a disk has so many."""

_IN_A_ROW = 3
_NODES = 6
"""How many autograd nodes behind a loss are named."""

_OF_THE_PLACE = frozenset({"record", "backend", "lock", "heal", "strict", "precision"})
"""Options that a replay chooses itself, or that have a field of their own."""


class _Call:
    """The last call of the model in which gradients are recorded."""

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, scale: float | Tensor | None
    ) -> None:
        self.model, self.scale = weakref.ref(model), scale
        # References are kept and not copies, since every call would pay for a copy: the
        # versions tell later whether an argument was written to.
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves = [*map(_without_history, leaves)]
        self._versions = self._now()
        self.torch_rng = torch.get_rng_state()
        used = torch.cuda.is_initialized()
        self.cuda_rng = torch.cuda.get_rng_state_all() if used else []
        self.gradients: dict[int, Tensor] = {}

    def _now(self) -> list[int]:
        return [compat.version(v) for v in self._leaves if isinstance(v, Tensor)]

    @property
    def arguments(self) -> Any:
        """The arguments and keyword arguments."""
        return pytree.tree_unflatten(self._leaves, self._spec)

    @property
    def rewritten(self) -> bool:
        """Whether an argument was written to since the call began."""
        return self._versions != self._now()


def _without_history(value: Any) -> Any:
    """`value`; a tensor that autograd has made is given without what made it."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, whose errors end the watch and never the training."""

    @functools.wraps(method)
    def safe(self: SnapshotWriter, *args: Any) -> None:
        if self.ended:
            return
        try:
            method(self, *args)
        except Exception as error:  # noqa: BLE001 (a snapshot never ends a training)
            self.end()
            logger.warning(
                "autoamp: no snapshot can be written to %s, and the training goes on: "
                "%s: %s",
                self.root,
                type(error).__name__,
                error,
            )

    return safe


class SnapshotWriter:
    """Watches the losses and steps of one conversion, and writes at most one snapshot.

    Attributes:
        root: the folder of `record=`.
        scaling: the scaling of the conversion, once it is known.
        ended: whether nothing is watched any more.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self.root, self.options = root, options
        self.scaling: ModelScaling | None = None
        self.ended = False
        self._call: _Call | None = None
        self._own: Callable[[], Tensor | None] = lambda: None
        self._loss: tuple[Tensor, dict[str, Any]] | None = None
        self._skipped: bool | Tensor | None = None
        self._in_a_row, self._backward, self._line = 0, -1, ""

    def end(self) -> None:
        """Watches no more, and lets go of the last call."""
        self.ended, self._call, self._loss = True, None, None

    @_safely
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Keeps the arguments of a call that begins."""
        self._settle("after the step")
        scaling, scale = self.scaling, None
        if scaling is not None and scaling.enabled:
            at = scaling.loss_scale.current
            # On a GPU the scale is a new tensor and no number, because reading it would
            # wait.
            scale = float(at) if at.device.type == "cpu" else at + 0
        self._call = _Call(model, args, kwargs, scale)

    @_safely
    def returned(self, result: Any) -> None:
        """Has the backward through the result of the call noticed."""
        leaves = pytree.tree_leaves(result)
        floats = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
        for index, each in enumerate(floats):
            if each.grad_fn is None:
                continue
            hook = functools.partial(_reached, weakref.ref(self), index)
            compat.hook_gradient(each, hook)
            if each.numel() == 1:
                # A reference to a loss would keep the whole graph of the step alive.
                self._own = weakref.ref(each)
                if each.device.type == "cpu":
                    self._look(each)

    @_safely
    def reached(self, index: int, gradient: Tensor) -> None:
        """Looks at the loss of a backward that has reached a result of the model."""
        # Only the third skipped step is written, so that only then gradients are kept.
        if self._in_a_row == _IN_A_ROW - 1 and self._call is not None:
            self._call.gradients[index] = gradient.detach()
        backward = compat.backward_id()
        if backward != self._backward:
            self._backward = backward
            losses, frame = compat.running_losses()
            if losses:
                self._look(losses[0], frame)

    def _look(self, loss: Tensor, frame: Any = None) -> None:
        facts: dict[str, Any] = {"own": self._own() is loss}
        mean = loss.detach() if loss.numel() == 1 else loss.detach().float().mean()
        # The loss of a GPU is looked at later, when the host waits in any case.
        if mean.device.type != "cpu":
            self._loss = mean, {**facts, "nodes": compat.history(loss, _NODES)}
        elif not math.isfinite(value := mean.item()):
            facts["nodes"] = compat.history(loss, _NODES)
            facts["line"] = line_outside(frame)
            self._write("loss", "before the step", {**facts, "value": repr(value)})

    @_safely
    def stepped(self, skipped: bool | Tensor) -> None:
        """Counts a step that is about to be taken, or is skipped."""
        self._line = self._line or line_outside()
        self._skipped = skipped
        if isinstance(skipped, bool):  # the host has just waited for the device
            self._settle("before the step")

    def _settle(self, when: str) -> None:
        """Reads what a device knew of the last loss and step."""
        loss, skipped = self._loss, self._skipped
        self._loss = self._skipped = None
        is_skipped = skipped is not None and bool(skipped)
        weights_of = "before the step" if is_skipped else when
        if loss is not None and not math.isfinite(value := loss[0].item()):
            self._write("loss", weights_of, {**loss[1], "value": repr(value)})
        if skipped is None or self.ended:
            return
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        if self._in_a_row == _IN_A_ROW:
            self._write("skips", weights_of, None)
        # The weights have moved on: the call cannot be replayed from them.
        if not is_skipped:
            self._call = None

    # -- the snapshot ------------------------------------------------------------------

    def _write(self, cause: str, when: str, loss: dict[str, Any] | None) -> None:
        call, scaling = self._call, self.scaling
        model = None if call is None else call.model()
        if call is None or model is None or scaling is None:
            return
        # The watch ends before anything is written: there is one snapshot at most, and
        # a disk that is full is not tried again.
        self.end()
        tensors = {"rng.torch": call.torch_rng}
        tensors |= {f"rng.cuda.{i}": each for i, each in enumerate(call.cuda_rng)}
        tensors |= {f"gradient.{i}": each for i, each in call.gradients.items()}
        args, kwargs = call.arguments
        ledger = scaling.ledger
        facts = {
            **_of_the_process(model),
            "cause": cause,
            "step": ledger.steps + (cause == "loss"),
            "loss": loss,
            "why": str(ledger.skips[-1]) if ledger.skips and cause == "skips" else "",
            "scale": None if call.scale is None else float(call.scale),
            "args": [files.packed(v, f"args.{i}", tensors) for i, v in enumerate(args)],
            "kwargs": {
                k: files.packed(v, f"kwargs.{k}", tensors) for k, v in kwargs.items()
            },
            "rewritten": call.rewritten,
            "weights_of": when,
            "precision": short_name(scaling.low) if scaling.low is not None else "",
            **_options(self.options),
            **_state(model, self._line, tensors),
        }
        name = f"{facts['label']}-rank-{facts['rank']}-step-{facts['step']}"
        where = files.write(self.root, name, facts, tensors)
        logger.warning(
            "autoamp: %s: %s at step %d: the snapshot for autoamp replay is in %s",
            facts["label"],
            "the loss is not finite" if cause == "loss" else "three steps were skipped",
            facts["step"],
            where,
        )


@compat.never_captured
def _reached(writer: weakref.ref[SnapshotWriter], index: int, gradient: Tensor) -> None:
    """A hook on a result; gives None, so that the gradient stays what it is."""
    found = writer()
    if found is not None:
        found.reached(index, gradient)


def _of_the_process(model: nn.Module) -> dict[str, Any]:
    try:
        version = metadata.version("autoamp")
    except metadata.PackageNotFoundError:  # a folder of source
        version = ""
    kind = type(model)
    several = compat.are_several()
    return {
        "format": files.FORMAT,
        "time": round(time.time(), 3),
        "autoamp": version,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "label": kind.__name__,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "in_eval": [name for name, m in model.named_modules() if not m.training],
        "rank": compat.own_rank() or 0,
        "world": torch.distributed.get_world_size() if several else 1,
        "python_rng": random.getstate(),
    }


def _options(options: Options) -> dict[str, Any]:
    """The options that differ from the defaults, and the names of those left out."""
    usual, found, left_out = Options(), dict[str, Any](), []
    for name in sorted({*OPTION_NAMES} - _OF_THE_PLACE):
        value = getattr(options, name)
        if value == getattr(usual, name):
            continue
        told = files.packed(value, name, {})
        if isinstance(told, dict) and "missing" in told:
            left_out.append(name)
        else:
            found[name] = told
    if options.chosen is not None:
        left_out.append("budget")
    return {"options": found, "options_left_out": left_out}


def _state(model: nn.Module, line: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Weights and optimizers, as far as `MOST_BYTES` allows; adds to `tensors`."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {f"model.{name}": t.detach() for name, t in named.items()}
    state: dict[str, Tensor] = {}
    optimizers = _optimizers_of(model, line, state)
    told = {"weights": "saved", "optimizer_state": "saved"}
    if not all(map(files.can_be_saved, weights.values())):
        told["weights"] = "they are sharded over ranks, sparse or complex"
    else:
        tensors |= weights
        size = sum(each.nbytes for each in tensors.values())
        if size > MOST_BYTES:
            told["weights"] = f"{size} bytes are more than {MOST_BYTES}"
            for name in weights:
                del tensors[name]
    size = sum(each.nbytes for each in (*tensors.values(), *state.values()))
    if told["weights"] != "saved" or size > MOST_BYTES:
        told["optimizer_state"] = f"with it {size} bytes are more than {MOST_BYTES}"
        if told["weights"] != "saved":
            told["optimizer_state"] = "the weights are not saved either"
        for each in optimizers:
            each["state"] = None
    else:
        tensors |= state
    bad = [n for n, t in named.items() if bool(compat.any_not_finite([t.detach()]))]
    return {**told, "optimizers": optimizers, "not_finite": bad}


def _optimizers_of(
    model: nn.Module, line: str, tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    names = {id(p): name for name, p in model.named_parameters()}
    found: list[dict[str, Any]] = []
    for boundary in list(BOUNDARIES):
        of = {} if boundary.masters is None else boundary.masters.of
        known = {**names, **{id(m): names.get(id(p), "") for p, m in of.items()}}
        params = boundary.optimizer.param_groups
        given = [known.get(id(p), "") for g in params for p in g["params"]]
        if any(given):
            state = boundary.optimizer.state_dict()
            found.append(
                {
                    "class": type(boundary.optimizer).__name__,
                    "params": given,
                    "state": files.packed(state, f"optimizer.{len(found)}", tensors),
                    "line": line,
                }
            )
    return found
