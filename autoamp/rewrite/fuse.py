"""Replaces the chains of a graph by the kernels that compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import (
    KERNEL,
    ForChain,
    tensors_of,
    written_values,
)
from autoamp.analyse.wishes import Wishes
from autoamp.kernels.attention import (
    WrittenAttention,
    softmaxes_in,
    written_attention,
)
from autoamp.kernels.chains import Chain, chains_in, layout_of
from autoamp.kernels.functions import functions_in
from autoamp.kernels.masks import ATTENTION as MASKED
from autoamp.kernels.masks import DROPOUT, MASK, causal_attention
from autoamp.kernels.recognise import Recognised, recognised
from autoamp.kernels.table import ATTENTION, CAUSAL_MASK, KERNEL_NAMES
from autoamp.ops import drop_dead
from autoamp.options import Options
from autoamp.place.devices import Device
from autoamp.rewrite.attention import may_be_one, with_attention
from autoamp.rules import Rules
from autoamp.trace.normalise import Normalised
from autoamp.trace.regions import Regions


def fuse(  # noqa: PLR0917
    normalised: Normalised,
    options: Options,
    low: torch.dtype,
    device: str | None = None,
    no_gain: Collection[str] = (),
    left: Collection[str] = (),
) -> Normalised | None:
    """The graph with a kernel for each chain that torch has one for.

    Args:
        device: type of the device that the graph is to run on; by default the one it
            was traced on.
        no_gain: names of kernels that are slower there than the chains.
        left: names of nodes that stay as they are.

    Returns:
        None where no chain is replaced; `normalised` is not changed.
    """
    leave = (*options.kernels_off, *no_gain)
    if len(leave) == len(KERNEL_NAMES):
        return None
    gm, mode = normalised.gm, normalised.fake_mode
    rules = options.resolve_rules(low)
    keep = (*options.kept, *rules.keep)
    wishes = Wishes(rules, Rules.default(low), keep, leave, device, left)
    found = _replaceable(gm, mode, wishes)
    if not found and not _attends(gm.graph):
        return None
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    for replacement in found:
        _replace(graph, replacement, values)
    in_regions = {values[node] for node in _in_regions(gm) if node in values}
    written = _written(graph, wishes, in_regions)
    put = bool(written) and with_attention(
        *(graph, written, mode, _exposed(graph)),
        tell_causal=CAUSAL_MASK not in leave,
    )
    causal = _causal(graph, wishes, in_regions)
    if not found and not put and not causal:
        return None
    for node in causal:
        _without_mask(node)
    drop_dead(graph)
    fused = compat.graph_module(gm, graph)
    fused.meta = dict(gm.meta)
    return replace(normalised, gm=fused)


def leave_out(device: Device, options: Options, *, own_ops: bool) -> tuple[str, ...]:
    """The kernels that are left out of a graph because of where and how it runs.

    `autoamp::attention` has a kernel for CPUs alone.  The backward of torch's kernels
    for other devices has an error of its own, which has yet to be held against
    autocast's.

    Args:
        own_ops: whether the graph may call ops of autoamp's.
    """
    slow = device.attends_by_products and options.objective != "memory"
    has_kernel = own_ops and device.type == "cpu"
    return () if has_kernel and not slow else (ATTENTION,)


@dataclass(frozen=True)
class _Replacement:
    """A chain, the kernel for it, and the note to leave."""

    chain: Chain
    kernel: Recognised
    note: ForChain


def _replaceable(
    gm: fx.GraphModule, mode: compat.FakeTensorMode, wishes: Wishes
) -> list[_Replacement]:
    """The chains to replace; no two share a call."""
    taken: set[fx.Node] = set()
    in_regions: set[fx.Node] | None = None
    layouts = _Layouts(mode)
    found = []
    for chain, recognise in _candidates(gm.graph):
        if not taken.isdisjoint(chain.nodes) or not wishes.allow(chain.nodes):
            continue
        if in_regions is None:
            in_regions = _in_regions(gm)
        if not in_regions.isdisjoint(chain.nodes):
            continue
        replacement = _replacement(chain, recognise(), layouts, wishes)
        if replacement is not None:
            taken.update(chain.nodes)
            found.append(replacement)
    if any(each.kernel.kernel.keeps_result for each in found):
        exposed = _exposed(gm.graph)
        found = [each for each in found if not _may_be_written(each, exposed)]
    return found


def _exposed(graph: fx.Graph) -> set[int]:
    """The storages that are written to in the graph, or could be after it."""
    written = [v for node in graph.nodes for v in written_values(node)]
    seen = [*written, *graph.output_node().all_input_nodes]
    return {compat.storage_id(t) for n in seen for t in tensors_of(n.meta.get("val"))}


def _may_be_written(replacement: _Replacement, exposed: set[int]) -> bool:
    """Whether somebody may write to a result that the kernel's backward needs."""
    result = compat.storage_id(replacement.chain.result.meta["val"])
    return replacement.kernel.kernel.keeps_result and result in exposed


def _candidates(
    graph: fx.Graph,
) -> Iterator[tuple[Chain, Callable[[], Recognised | None]]]:
    """What a kernel might replace, each with what tells the kernel."""
    yield from functions_in(graph)
    for chain in itertools.chain.from_iterable(chains_in(graph)):
        yield chain, partial(recognised, chain)


def _attends(graph: fx.Graph) -> bool:
    """Whether there may be attention that can be told more simply."""
    masked = graph.find_nodes(op="call_function", target=MASKED)
    return bool(masked or softmaxes_in(graph))


def _written(
    graph: fx.Graph, wishes: Wishes, in_regions: Collection[fx.Node]
) -> list[WrittenAttention]:
    """The attentions written out that become calls of torch's."""
    if ATTENTION in wishes.leave:
        return []
    return [
        each
        for each in written_attention(graph)
        if wishes.allow(each.nodes)
        and not any(node in in_regions for node in each.nodes)
        and may_be_one(graph, each)
    ]


def _causal(
    graph: fx.Graph, wishes: Wishes, in_regions: Collection[fx.Node]
) -> list[fx.Node]:
    """The calls of attention that need no mask if they are told that it is causal."""
    if CAUSAL_MASK in wishes.leave:
        return []
    found = causal_attention(graph)
    return [n for n in found if wishes.allow([n]) and n not in in_regions]


def _without_mask(attention: fx.Node) -> None:
    """Tells a call of attention that it is causal, and takes its mask away."""
    dropout = attention.args[DROPOUT] if len(attention.args) > DROPOUT else 0.0
    attention.args = (*attention.args[:MASK], None, dropout, True)
    known = attention.meta.get(KERNEL)
    calls = 2 if known is None else known.calls + 1
    name = CAUSAL_MASK if known is None else known.kernel
    attention.meta[KERNEL] = ForChain(name, calls, widens=False)


def _in_regions(gm: fx.GraphModule) -> set[fx.Node]:
    """The calls in autocast regions of the model's own, which run as they are."""
    regions = Regions(gm)
    found = set()
    for node in gm.graph.nodes:
        regions.follow(node)
        if regions.is_on is not None:
            found.add(node)
    return found


class _Layouts:
    """The layouts of kernels' results, asked of fake tensors once for each layout."""

    def __init__(self, mode: compat.FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, tuple[int | str, ...]] = {}

    def of(self, chain: Chain, kernel: Recognised) -> tuple[int | str, ...]:
        """The shape and strides of the kernel's result."""
        data: torch.Tensor = chain.data.meta["val"]
        layout = layout_of(data)
        key = (kernel, data.dim(), layout)
        if key in self._known:
            return self._known[key]
        with self._mode, compat.outside_trace(), torch.no_grad():
            made = kernel(data, [n.meta["val"] for n in chain.vectors])
        found = layout_of(made)
        self._known[key] = found
        return found


def _replacement(
    chain: Chain, kernel: Recognised | None, layouts: _Layouts, wishes: Wishes
) -> _Replacement | None:
    """The kernel for a chain; None where there is none, or where it lies otherwise.

    A result with other strides than the chain's could not be viewed as the chain's is.
    """
    if kernel is None or kernel.kernel.name in wishes.leave:
        return None
    expected = chain.result.meta["val"]
    if layouts.of(chain, kernel) != layout_of(expected):
        return None
    widens = any(map(wishes.widens, chain.nodes))
    note = ForChain(kernel.kernel.name, chain.calls, widens)
    return _Replacement(chain, kernel, note)


def _replace(
    graph: fx.Graph,
    replacement: _Replacement,
    values: Mapping[fx.Node, fx.Node],
) -> None:
    """Puts a kernel in the place of a chain's copy in `graph`.

    Args:
        values: each node of the graph that was copied to its copy.
    """
    chain, found = replacement.chain, replacement.kernel
    result = values[chain.result]
    vectors = [values[n] for n in chain.vectors]
    weight = None if found.weight is None else vectors[found.weight]
    bias = None if found.bias is None else vectors[found.bias]
    size = chain.data.meta["val"].shape[-1]
    kernel = found.kernel
    with graph.inserting_before(result):
        rest = kernel.arguments(size, weight, bias, found.epsilon)
        args = (values[chain.data], *rest)
        node = graph.call_function(kernel.op, args, dict(kernel.keywords))
    node.meta = {**result.meta, KERNEL: replacement.note}
    result.replace_all_uses_with(node)
    for each in reversed(chain.nodes):
        graph.erase_node(values[each])
