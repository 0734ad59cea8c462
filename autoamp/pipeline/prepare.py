"""Turns a captured graph into a `Prepared` one, for every model that runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.graph_functions import (
    attention,
    checkpoint_as_python_does,
    traced_attention,
    with_own_kernels,
)
from autoamp.kernels.table import ATTENTION_BACKWARD, CHANNELS_LAST, ROTARY
from autoamp.options import Options
from autoamp.pipeline.prepared import Prepared
from autoamp.pipeline.run import Setting, rewrite_graph
from autoamp.place.devices import Device, device_of, main_device
from autoamp.place.layouts import FORMATS, choose_layouts, convolved
from autoamp.printable import printable_line
from autoamp.rewrite.attention import with_own_attention
from autoamp.rewrite.bindings import with_bindings
from autoamp.rewrite.edge.scale_edge import Edge, scale_edge, scale_inputs
from autoamp.rewrite.for_compilers import for_compilers
from autoamp.rewrite.fuse import with_own_softmax
from autoamp.rewrite.hoist import (
    Hoisted,
    hoist_weight_casts,
    read_wide,
    with_casts_inside,
)
from autoamp.rewrite.layouts import lay_out
from autoamp.rewrite.rewritten import Rewritten
from autoamp.rewrite.rotary import with_rotary

_ANYWHERE = Setting()


def prepare(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    low: torch.dtype,
    *,
    scaled: bool,
    setting: Setting = _ANYWHERE,
) -> Prepared:
    """Runs the pass on `gm`, takes its weight casts out and scales it at its edge.

    Args:
        inputs: the inputs Dynamo captured `gm` with.
        options: the options of the conversion; `options.backend` compiles the result.
        scaled: whether the gradients of the graph are scaled at its edge.
        setting: the device `gm` is to run on, by default the one it was captured on,
            and the prices.

    Raises:
        AutoampError: a pass failed; the message says where.
    """
    eager = options.backend == "eager"
    rewritten = rewrite_graph(
        gm,
        inputs,
        options,
        low,
        free_weights=True,
        own_kernels=eager and options.fuse,
        own_ops=_takes_our_ops(options),
        price=setting.price,
        device=setting.device,
    )
    notes = _given_up(rewritten)
    try:
        hoisted = hoist_weight_casts(rewritten)
    except Exception as error:
        if options.strict:
            raise
        problem = f"{type(error).__name__}: {error}"
        notes.append(printable_line(f"its weights are cast at every call: {problem}"))
        hoisted = with_casts_inside(rewritten)
    bound = hoisted.gm
    edge = scale_edge(bound, rewritten) if scaled else Edge()
    layouts: tuple[torch.memory_format, ...] = ()
    if options.fuse and rewritten.sums.low:
        on = setting.device or device_of(main_device(bound), low)
        layouts = _with_functions(hoisted, len(inputs), options, on)
    if eager:
        run = with_bindings(bound)
    else:
        extra = [t for device in edge.devices for t in scale_inputs(device)]
        given = _given(hoisted, inputs, low, layouts, extra)
        ready = for_compilers(bound, inductor=compat.is_inductor(options.backend))
        compat.as_dynamo_gave(ready, gm)
        compat.make_code(ready)
        run = compat.compile_with(options.backend, ready, given)
    return Prepared(
        rewritten,
        bound,
        run,
        notes=tuple(notes),
        weights=tuple(hoisted.weights),
        read_wide=read_wide(bound, len(inputs)),
        layouts=layouts,
        edge=edge,
        sizes=tuple(i for i, v in enumerate(inputs) if isinstance(v, torch.SymInt)),
    )


def _with_functions(
    hoisted: Hoisted, first: int, options: Options, device: Device
) -> tuple[torch.memory_format, ...]:
    """Puts functions of autoamp's in a graph, and gives the formats of its copies.

    Args:
        first: the position of the first copy among the inputs of the graph.
        device: the device the graph runs on.
    """
    gm, left = hoisted.gm, options.kernels_off
    own = _attention_for(options)
    if own is not None:
        with_own_attention(gm, own)
    with_own_softmax(gm)
    if options.backend == "eager":
        with_own_kernels(gm)
        if ROTARY not in left:
            with_rotary(gm)
    if CHANNELS_LAST in left:
        return ()
    if options.backend == "eager":
        return _laid_out(gm, hoisted, first, device)
    on_inductor = compat.is_inductor(options.backend)
    return _as_inductor_lays(gm, hoisted, first) if on_inductor else ()


def _attention_for(options: Options) -> Callable[..., Any] | None:
    """The function for attention that the model calls; None leaves it to torch."""
    if ATTENTION_BACKWARD in options.kernels_off:
        return None
    if options.backend == "eager":
        return attention
    return traced_attention if _takes_our_ops(options) else None


def _takes_our_ops(options: Options) -> bool:
    """Whether ops that are not torch's may be called: of compilers inductor can."""
    return options.backend == "eager" or compat.is_inductor(options.backend)


def _laid_out(
    gm: fx.GraphModule, hoisted: Hoisted, first: int, device: Device
) -> tuple[torch.memory_format, ...]:
    """Lays `gm` out anew where that pays, and gives the formats of the copies.

    Args:
        first: the position of the first copy among the inputs of `gm`.
    """
    copies = _copies(gm, hoisted, first)
    layouts = choose_layouts(gm.graph, copies, device)
    if layouts is None:
        return ()
    lay_out(gm, layouts)
    return _formats(copies, layouts.weights)


def _as_inductor_lays(
    gm: fx.GraphModule, hoisted: Hoisted, first: int
) -> tuple[torch.memory_format, ...]:
    """The formats of the copies as inductor lays weights, which then permutes none.

    Inductor lays the operands of convolutions on CPUs with the channels last.  But the
    strides of a depthwise weight fit both layouts: inductor leaves such an input as it
    is, and torch then computes that convolution with the channels first.
    """
    copies = _copies(gm, hoisted, first)
    on_cpu = compat.inductor_permutes() and main_device(gm).type == "cpu"
    weights = convolved(gm.graph, copies) if on_cpu else frozenset()
    return _formats(copies, weights) if weights else ()


def _copies(gm: fx.GraphModule, hoisted: Hoisted, first: int) -> list[fx.Node]:
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return inputs[first : first + len(hoisted.weights)]


def _formats(
    copies: Sequence[fx.Node], last: Collection[fx.Node]
) -> tuple[torch.memory_format, ...]:
    """The format of each copy, with the channels last for those in `last`."""
    return tuple(
        FORMATS[c.meta["val"].dim()] if c in last else torch.preserve_format
        for c in copies
    )


def as_it_is(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, problem: str
) -> Prepared:
    """The graph made ready to run in fp32, because of `problem`."""
    if options.backend == "eager":
        checkpoint_as_python_does(gm)
    run = compat.compile_with(options.backend, gm, inputs)
    return Prepared(None, gm, run, problem)


def _given(
    hoisted: Hoisted,
    inputs: Sequence[Any],
    low: torch.dtype,
    layouts: Sequence[torch.memory_format],
    extra: Sequence[torch.Tensor],
) -> list[Any]:
    """The arguments the graph is called with: `inputs`, weight copies, and scales.

    Copies and scales are fake tensors: a compiler that makes fakes of them by itself
    gives their sizes symbols, where any size of the inputs may change.
    """
    formats = layouts or (torch.preserve_format,) * len(hoisted.weights)
    copies = [
        torch.empty_like(inputs[i].detach(), dtype=low, memory_format=layout)
        for i, layout in zip(hoisted.weights, formats, strict=True)
    ]
    mode = compat.current_fake_mode(inputs)
    added = [*copies, *extra]
    return [*inputs, *(added if mode is None else compat.fake_inputs(added, mode))]


def _given_up(rewritten: Rewritten) -> list[str]:
    """One line for each error of a check, with the ops that stay fp32 because of it."""
    errors: dict[str, list[str]] = {}
    for each in rewritten.with_bodies():
        for name, why in each.given_up.items():
            fact = each.facts.nodes.get(name)
            place = (fact.source or fact.module or name) if fact else name
            errors.setdefault(why, []).append(place)
    found = []
    for why, places in errors.items():
        where = ", ".join(dict.fromkeys(places[:4]))
        more = f" and {len(places) - 4} more" if len(places) > 4 else ""
        found.append(printable_line(f"{why} (ops at {where}{more})"))
    return found
