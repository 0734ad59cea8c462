"""Captures a stand-in of a model for a tool that runs its graphs in its own way.

The stand-in is a module of the same class that shares the model's modules and weights.
It is converted as by `convert`, but without weight copies, without optimizers, and
without graphs shared with other models.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import class_name
from autoamp.passes.decide.devices import Device
from autoamp.passes.graph_record import Prepared, Rewritten, Setting
from autoamp.passes.options import PassOptions
from autoamp.passes.run import as_it_is, rewrite_normalised
from autoamp.passes.see.normalise import Normalised
from autoamp.removed import OPTIONS as REMOVED
from autoamp.runtime.captured_graph import Graph
from autoamp.runtime.conversion import (
    conversion_of,
    install,
    without_ours,
)
from autoamp.runtime.conversion_record import Record
from autoamp.runtime.eligible import for_model, unsupported
from autoamp.runtime.engine import Engine
from autoamp.runtime.entry import Entry
from autoamp.training.attach import end_scaling, new_scaling
from autoamp.training.options import OPTION_NAMES, Options
from autoamp.training.scale import resolve_loss_scale

Play = Callable[[Prepared, tuple[Any, ...]], Any]
"""Runs a graph on the arguments of a call, and returns its results."""


def checked_model(model: Any, *, needs_data: bool = True) -> nn.Module:
    """The module to ask about, inside any wrapper that only distributes calls.

    Args:
        needs_data: whether the question is about numbers that the model computes.

    Raises:
        UnsupportedModelError: `model` is no module, cannot be captured, or holds no
            data.
    """
    model = compat.inside_wrappers(model)
    reason = unsupported(model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    assert isinstance(model, nn.Module)
    path = without_data(model) if needs_data else ""
    if path:
        raise UnsupportedModelError(
            f"{path} of {class_name(model)} is on the meta device, and nothing loads "
            "it for a call; load the model's weights onto a device first"
        )
    return model


def call_keywords(
    question: str, kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of the call that a question is about.

    One law holds for all questions, and for `export`: positional arguments and `kwargs`
    are the model's, other keywords are options.

    Raises:
        OptionError: `kwargs` is no dict, or there is no option of some name.
    """
    for name in options.keys() - {*OPTION_NAMES}:
        if name in REMOVED:
            raise OptionError(f"{name}= was removed: {REMOVED[name]}")
        close = difflib.get_close_matches(name, OPTION_NAMES, 1)
        meant = f"; did you mean {close[0]}?" if close else "."
        raise OptionError(
            f"{question}() has no option {name!r}{meant} A keyword argument of the "
            f"model goes into kwargs={{{name!r}: ...}}. The options are "
            f"{', '.join(OPTION_NAMES)}"
        )
    if not isinstance(kwargs, Mapping | None):
        raise OptionError(
            f"kwargs= is a {type(kwargs).__name__}, not a dict of keyword arguments of "
            "the model"
        )
    return dict(kwargs or {})


def options_for(
    model: Any, given: Mapping[str, Any] | None, default: Options | None = None
) -> Options:
    """The options `given`, added to the options of the model's conversion.

    Where the model is not converted, they are added to `default`.
    """
    state = conversion_of(model)
    engine = state.engine if state is not None else None
    own = engine.options if engine is not None else None
    return (own or default or Options()).replace(**(given or {}))


def twin_of(model: nn.Module) -> nn.Module:
    """A module of the same class with the same children, weights and attributes."""
    # Neither the constructor nor a copy: the twin has the same weights, in the same
    # memory.
    twin = type(model).__new__(type(model))
    twin.__dict__.update(without_ours(model.__dict__, model))
    return twin


def without_data(model: nn.Module) -> str:
    """The path of the first weight or buffer without data, not even in a call, or "".

    Hooks before a module's calls, or a `forward` that a library has put on it, may load
    its weights, and those of modules inside it, for each call: Accelerate's offloading
    leaves them on the meta device between calls.
    """
    loaded: list[str] = []
    for path, module in compat.named_modules_of(model):
        own = without_ours(module.__dict__, module)
        loads = "forward" in own or own["_forward_pre_hooks"]
        if loads or path.startswith(tuple(loaded)):
            loaded.append(f"{path}." if path else "")
            continue
        held = compat.parameters_here(module) | compat.buffers_here(module)
        for name, tensor in held.items():
            if tensor is not None and tensor.is_meta:
                return f"{path}.{name}" if path else name
    return ""


def on_the_models_device(model: nn.Module, values: Any) -> Any:
    """`values`; if the model holds no data, with every tensor on the meta device."""
    if not without_data(model):
        return values
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), values)


@contextlib.contextmanager
def examined(
    model: nn.Module, options: Options, low: torch.dtype, device: Device | None = None
) -> Iterator[tuple[nn.Module, Examiner]]:
    """A converted stand-in of `model`, and the engine that runs its graphs.

    Args:
        low: the compute dtype.
        device: the device that graphs are made for; by default the graphs' own device.
    """
    options = for_model(model, options, low)
    twin = twin_of(model)
    state = install(twin)
    label = class_name(model)
    # A scaling of its own: a question moves no loss scale of the model.
    scaling = new_scaling(options, resolve_loss_scale(options.loss_scale, low), label)
    try:
        record = Record(label, low, scaling)
        engine = Examiner(options.replace(backend="eager"), record, device=device)
        state.call = Entry(engine, type(twin), of_class=state.previous is None)
        yield twin, engine
    finally:
        end_scaling(scaling)


@dataclass(eq=False)
class Examiner(Engine):
    """Rewrites graphs for the record, and runs each through `play`.

    Attributes:
        play: runs a rewritten graph; None runs the graph as it was captured, in fp32.
    """

    shares_graphs = False  # models that are alike run their graphs in another way
    rests = False  # a question is about the ops that stay fp32, too

    play: Play | None = None
    _plain: dict[Prepared, Callable[..., Any]] = field(default_factory=dict)

    def runs_code(self) -> bool:
        """Graphs that no `play` runs are only looked at."""
        return self.play is not None

    def apart(self, path: str) -> str:
        """Each module has graphs of its own: a question is about one module."""
        return path

    def prepared(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Prepared:
        prepared = super().prepared(gm, example_inputs)
        # This comes last, because it changes how the bodies in `gm` run.
        self._plain[prepared] = as_it_is(gm, example_inputs, self.options, "").run
        return prepared

    def as_captured(self, prepared: Prepared, args: Sequence[Any]) -> Any:
        """Runs a graph as it was captured, in fp32."""
        return self._plain[prepared](*args)

    def _bind(self, prepared: Prepared, _: Sequence[Any]) -> Callable[..., Any]:
        for why in prepared.notes:
            self.record.note(why)
        captured = Graph(prepared)
        self.record.add(captured)

        def call(*args: Any) -> Any:
            self.local.runs += 1
            self.local.rewritten += prepared.rewritten is not None
            captured.runs += 1
            if self.play is None or prepared.rewritten is None:
                return self.as_captured(prepared, args)
            return self.play(prepared, args)

        return call


def replanned(rewritten: Rewritten, options: PassOptions) -> Rewritten:
    """The record of the same graph, rewritten under `options`.

    The caller must be in the grad mode of the capture.
    """
    before = before_rewrite(rewritten)
    setting = Setting(free_weights=True, own_kernels=rewritten.facts.own_kernels)
    graph = Normalised(before, (), rewritten.fake_mode)
    found = rewrite_normalised(graph, options, rewritten.low, setting, {})
    # Bodies are found in `before` by identity, and the pass has put new bodies into it.
    return replace(found, before=before)


def before_rewrite(rewritten: Rewritten) -> fx.GraphModule:
    """The graph before the rewrite, with bodies as they were before it."""
    gm = compat.graph_module(rewritten.before, rewritten.before.graph)
    gm.meta.update(rewritten.before.meta)
    for name, child in rewritten.before.named_children():
        for body in rewritten.bodies:
            if child is body.gm:
                setattr(gm, name, before_rewrite(body))
    return gm
