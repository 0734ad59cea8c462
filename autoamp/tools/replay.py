"""Runs the last step of a snapshot again, and has `find_overflow` name its op."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.dtypes import parse_low_dtype
from autoamp.errors import OptionError
from autoamp.runtime.examine import checked_model
from autoamp.runtime.kept import left_as_it_is
from autoamp.runtime.stand_in import LossFn, floats_of, own_loss
from autoamp.tools import blame
from autoamp.tools.find_overflow import Overflow, find_overflow_model
from autoamp.training import snapshot_files as files
from autoamp.training.options import OPTION_NAMES
from autoamp.training.remedy import Remedy
from autoamp.training.snapshot_files import Missing, Snapshot
from autoamp.training.trail import OUTSIDE

Call = tuple[tuple[Any, ...], dict[str, Any]]


def find_overflow_in(
    model: nn.Module,
    folder: str | os.PathLike[str],
    call: Call,
    given: Mapping[str, Any] | None,
    loss_fn: LossFn | None = None,
) -> tuple[Overflow, Snapshot]:
    """The number that left its range in the newest snapshot in `folder`.

    The model is as it was afterwards.

    Args:
        call: arguments in place of those that the snapshot could not hold.
        given: options of `convert`, added to those of the snapshot.
        loss_fn: the loss of the output.  By default the gradients that came in with
            the results of the model are those of the snapshot; where it has none, the
            loss is the output's `loss`, or the sum of the output's float tensors.

    Raises:
        OptionError: there is no snapshot, or the model is another one.
    """
    first, *others = files.found_in(folder)
    snapshot = files.read(first)
    facts = snapshot.facts
    notes = [f"older snapshots beside {first}: {len(others)}"] if others else []
    model = checked_model(model)
    options = {**_options(snapshot, notes), **(given or {})}
    seen: list[Any] = []

    def loss_of(output: Any) -> Tensor:
        seen[:] = [own_loss(output), *(t.detach() for t in floats_of(output))]
        return _loss(output, snapshot, loss_fn)

    try:
        with left_as_it_is(model, weights=True):
            notes += _place(model, snapshot)
            args, kwargs = _arguments(model, snapshot, call)
            found = find_overflow_model(
                model, args, kwargs, options, loss_of, scale=facts["scale"] or 1.0
            )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        if not _is_damaged(facts):
            raise
        what = f"{first} is damaged ({type(error).__name__}: {error})"
        raise OptionError(f"the snapshot {what}") from None
    if not found or found.harmless:
        # Under another loss or other options, a finite loss says nothing of the code.
        same = loss_fn is None and not given
        found = _outside(found, snapshot, seen) if same else found
    notes = [*blame.notes(found, snapshot), *notes]
    return replace(found, notes=tuple(notes)), snapshot


def rules_text(rule: Remedy, snapshot: Snapshot) -> str:
    """A rule as a rules file, for `rules=`."""
    facts = snapshot.facts
    where = f"{facts['label']} died at step {facts['step']}"
    what = json.dumps(f"{where}: tried by autoamp replay")
    found = ["[meta]", f"description = {what}"]
    if rule.deny:
        found += ["", "[deny]"]
        found += [f'{json.dumps(name)} = "left its range"' for name in rule.deny]
    if rule.keep:
        found += ["", "[keep]", f"modules = {json.dumps([*rule.keep])}"]
    return "\n".join(found) + "\n"


def _is_damaged(facts: dict[str, Any]) -> bool:
    wanted = {"label", "cause", "step", "weights", "args", "kwargs", "in_eval", "loss"}
    return not wanted | {"options", "optimizers", "not_finite", "scale"} <= {*facts}


def _options(snapshot: Snapshot, notes: list[str]) -> dict[str, Any]:
    facts, home = snapshot.facts, torch.device("cpu")
    found = {
        name: files.unpacked(told, {}, home)
        for name, told in facts.get("options", {}).items()
        if name in OPTION_NAMES
    }
    if parse_low_dtype(facts.get("precision", "")) is not None:
        found["precision"] = facts["precision"]
    if left_out := [n for n in facts.get("options_left_out", ()) if n != "loss_scale"]:
        notes.append(
            f"the snapshot could not hold the options {', '.join(left_out)}: give them "
            "to autoamp.find_overflow(model, snapshot=..., OPTION=...)"
        )
    return found


@torch.no_grad()
def _place(model: nn.Module, snapshot: Snapshot) -> list[str]:
    """Writes weights and generators in place; says what is not as it was.

    Raises:
        OptionError: the model has other weights.
    """
    facts, weights = snapshot.facts, snapshot.beginning("model.")
    notes = []
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if facts["weights"] != "saved":
        notes.append(
            f"the snapshot holds no weights ({facts['weights']}): those of the model "
            "given are used, so load a checkpoint in its factory"
        )
        weights = {}
    elif wrong := _difference(named, weights):
        raise OptionError(
            f"the model given is not the {facts['label']} of the snapshot: {wrong}; "
            "give the model that was trained, with the same sizes and dtype"
        )
    for name, value in weights.items():
        named[name].copy_(value)
    if facts.get("weights_of") == "after the step":
        notes.append("the loss was read after the step: weights are those after it")
    if facts.get("rewritten"):
        notes.append("the script has written to the arguments after the call")
    for name, module in model.named_modules():
        module.training = name not in facts["in_eval"]
    with contextlib.suppress(KeyError, RuntimeError, TypeError, ValueError):
        version, numbers, last = facts["python_rng"]
        random.setstate((version, tuple(numbers), last))
        torch.set_rng_state(snapshot.tensors["rng.torch"])
        on_gpus = [*snapshot.beginning("rng.cuda.").values()]
        if len(on_gpus) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(on_gpus)
        return notes
    return [*notes, "the random generators could not be put in place"]


def _difference(named: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str:
    """The first weight in which a model differs from a snapshot, or ""."""
    for name in [*saved, *named]:
        here, there = named.get(name), saved.get(name)
        if here is None:
            return f"it has no {name}"
        if there is None:
            return f"the snapshot has no {name}"
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            mine, its = (f"{[*t.shape]} of {t.dtype}" for t in (here, there))
            return f"{name} is {mine}, and {its} in the snapshot"
    return ""


def _arguments(model: nn.Module, snapshot: Snapshot, call: Call) -> Call:
    """The arguments of the snapshot; those that it could not hold are the call's.

    Raises:
        OptionError: one is missing in both.
    """
    held = (*model.parameters(), *model.buffers())
    home = next((t.device for t in held), torch.device("cpu"))
    given_args, given = call

    def made(told: Any, name: str, instead: list[Any]) -> Any:
        value = files.unpacked(told, snapshot.tensors, home)
        missing = [v for v in pytree.tree_leaves(value) if isinstance(v, Missing)]
        if missing and not instead:
            raise OptionError(
                f"the snapshot could not hold argument {name} (a {missing[0].what}): "
                "have the factory return it in (model, args, kwargs), or give it to "
                "find_overflow"
            )
        return instead[0] if missing else value

    facts = snapshot.facts
    args = tuple(
        made(told, str(at), [*given_args[at : at + 1]])
        for at, told in enumerate(facts["args"])
    )
    kwargs = {
        name: made(told, name, [given[name]] if name in given else [])
        for name, told in facts["kwargs"].items()
    }
    return args, kwargs


def _loss(output: Any, snapshot: Snapshot, loss_fn: LossFn | None) -> Tensor:
    """A loss whose gradients are those of the snapshot's step, as far as known."""
    if loss_fn is not None:
        return loss_fn(output)
    own, floats = own_loss(output), floats_of(output)
    gradients = snapshot.beginning("gradient.")
    pairs = [
        (t, gradients[str(at)].to(t.device))
        for at, t in enumerate(floats)
        if str(at) in gradients
    ]
    if any(t.shape != g.shape for t, g in pairs):
        pairs = []
    if not floats and own is None:
        raise OptionError(
            "the model's output holds no float tensor to make a loss of; give a loss, "
            "a function of the output"
        )
    if pairs:
        parts = [(t.double() * g.double()).sum() for t, g in pairs]
    else:
        parts = [own] if own is not None else [t.float().sum() for t in floats]
    return sum(parts[1:], parts[0])


def _outside(found: Overflow, snapshot: Snapshot, results: list[Any]) -> Overflow:
    """What code after the model made, where the model itself made nothing infinite."""
    loss = snapshot.facts["loss"]
    gradients = snapshot.beginning("gradient.").values()
    blamed = replace(
        found,
        found=True,
        direction="forward",
        kind=OUTSIDE,
        op="",
        name="the loss",
        module="",
        source="",
        dtype=torch.float32,
        in_fp32=True,
        harmless=False,
    )
    finite = all(bool(t.isfinite().all()) for t in results if isinstance(t, Tensor))
    if loss and not loss["own"] and finite:
        size = abs(float(loss["value"]))
        return replace(blamed, source=loss.get("line", ""), largest=size)
    if any(not bool(each.isfinite().all()) for each in gradients):
        name, size = "a result of the model", math.nan
        return replace(blamed, direction="backward", name=name, largest=size)
    return found
