"""Runs the recorded step on a model that a factory makes, without the script."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoamp.ask.stand_in import default_loss, floats_of, own_loss
from autoamp.errors import OptionError
from autoamp.model.convert import convert_model
from autoamp.options import Options
from autoamp.overflow.remedy import Remedy
from autoamp.replay.placed import tensors_by_path
from autoamp.replay.recorded import Recorded, Saved
from autoamp.replay.rerun import replaying
from autoamp.replay.session import Outcome, ReplayEnds, Session

Make = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def called_by(make: Make, loss_fn: Callable[..., Any] | None) -> Callable[..., Outcome]:
    """A function that runs the step on the model that `make` gives.

    Args:
        make: gives the model, and arguments in place of those that were not saved.
        loss_fn: the loss of the model's output, or of the output and the tensors of
            the caller's variables by name.
    """

    def run(recorded: Recorded, remedy: Remedy) -> Outcome:
        session = Session(recorded, remedy)
        model, args, kwargs = make()
        model.train(recorded.calls[0].training)
        with replaying(session):
            convert_model(model, Options().replace(**recorded.options))
            try:
                for _ in recorded.calls:
                    output = model(*args, **kwargs)
                    if not session.outcome.reached:
                        break
                    loss = _loss(output, recorded, loss_fn)
                    if loss.requires_grad:
                        loss.backward()
                    session.outcome.loss = float(loss.detach())
            except ReplayEnds:
                pass
            session.finish()
        if not session.outcome.reached:
            raise OptionError(
                "; ".join(
                    session.outcome.notes
                    or [f"the factory's model is no {recorded.facts['class']}"]
                )
            )
        return session.outcome

    return run


def _loss(
    output: Any, recorded: Recorded, loss_fn: Callable[..., Any] | None
) -> Tensor:
    if loss_fn is not None:
        wants = len(inspect.signature(loss_fn).parameters)
        given = (output, caller_tensors(recorded))[: max(1, min(wants, 2))]
        found = loss_fn(*given)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise OptionError("--loss must give a tensor of one element")
        return found
    if own_loss(output) is None:
        found = _of_the_same_kind(output, recorded)
        if found is not None:
            return found
    return default_loss(output)


def caller_tensors(recorded: Recorded) -> dict[str, Tensor]:
    """The tensors of the caller's variables by name, the innermost function's first."""
    found: dict[str, Tensor] = {}
    for frame in recorded.frames:
        for name, value in frame.locals.items():
            for path, tensor in tensors_by_path(_plain(value), name):
                found.setdefault(path, tensor)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Saved):
        return value.tensor
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else None


def _of_the_same_kind(output: Any, recorded: Recorded) -> Tensor | None:
    """A loss whose autograd nodes are those of the recorded one."""
    floats, kinds = floats_of(output), recorded.history[:1]
    if not floats or not kinds:
        return None
    out, kind = floats[0], kinds[0].rstrip("0123456789").removesuffix("Backward")
    pairs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "MseLoss": functional.mse_loss,
        "SmoothL1Loss": functional.smooth_l1_loss,
        "BinaryCrossEntropyWithLogits": functional.binary_cross_entropy_with_logits,
    }
    if kind == "Mean":
        return out.float().mean()
    for name, target in caller_tensors(recorded).items():
        if name in ("loss", "out", "output", "outputs", "logits", "x", "input"):
            continue
        here = target.to(out.device)
        if kind in pairs and target.shape == out.shape:
            return pairs[kind](out.float(), here.float())
        if kind.startswith("NllLoss") and target.dtype == torch.int64:
            rows = out.flatten(0, -2) if out.ndim > target.ndim else out
            if target.numel() == len(rows):
                return functional.cross_entropy(rows.float(), here.flatten())
    return None
