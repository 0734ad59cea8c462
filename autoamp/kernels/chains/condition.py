"""Which chains of a graph are replaced by a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import ForChain
from autoamp.kernels.chains.chain import Chain, chains_in
from autoamp.kernels.chains.functions import functions_in
from autoamp.kernels.chains.recognise import Recognised, recognised
from autoamp.kernels.shared.calls import layout_of
from autoamp.kernels.shared.condition import Allowed, exposed_storages


@dataclass(frozen=True)
class Replacement:
    """A chain, the kernel for it, and the note to leave."""

    chain: Chain
    kernel: Recognised
    note: ForChain


def replaceable(
    graph: fx.Graph, mode: compat.FakeTensorMode, allowed: Allowed
) -> list[Replacement]:
    """The chains to replace; no two share a call."""
    taken: set[fx.Node] = set()
    layouts = _Layouts(mode)
    found = []
    for chain, recognise in _candidates(graph):
        if not taken.isdisjoint(chain.nodes) or not allowed.takes(chain.nodes):
            continue
        if any(map(_takes_the_rest, chain.nodes)):
            continue
        replacement = _replacement(chain, recognise(), layouts, allowed)
        if replacement is not None:
            taken.update(chain.nodes)
            found.append(replacement)
    if any(each.kernel.kernel.keeps_result for each in found):
        exposed = exposed_storages(graph)
        found = [each for each in found if not _may_be_written(each, exposed)]
    return found


def _takes_the_rest(node: fx.Node) -> bool:
    """Whether a call is a row's maximum with a gradient, as in `x - x.amax(-1, True)`.

    Its gradient is less the sum of the row's rounded gradients: those of `x` add up to
    0, and so do those of a bias before it.  A kernel for all of it would round each
    gradient for itself.  So the difference stays, and the rest of the chain is a chain
    of its own, that reads the difference.
    """
    if node.target is not torch.ops.aten.amax.default:
        return False
    cut = torch.ops.aten.detach.default
    return all(n.target is not cut for n in (node.args[0], *node.users))  # type: ignore[union-attr]


def _may_be_written(replacement: Replacement, exposed: set[int]) -> bool:
    """Whether somebody may write to a result that the kernel's backward needs."""
    result = compat.storage_id(replacement.chain.result.meta["val"])
    return replacement.kernel.kernel.keeps_result and result in exposed


def _candidates(
    graph: fx.Graph,
) -> Iterator[tuple[Chain, Callable[[], Recognised | None]]]:
    """The chains that may be kernels, each with a way to find the kernel."""
    yield from functions_in(graph)
    for chain in itertools.chain.from_iterable(chains_in(graph)):
        yield chain, partial(recognised, chain)


def _replacement(
    chain: Chain, kernel: Recognised | None, layouts: _Layouts, allowed: Allowed
) -> Replacement | None:
    """The kernel for a chain; None where there is none, or where it lies otherwise.

    A result with other strides than the chain's could not be viewed as the chain's is.
    """
    if kernel is None or kernel.kernel.name in allowed.off:
        return None
    expected = chain.result.meta["val"]
    if layouts.of(chain, kernel) != layout_of(expected):
        return None
    widens = any(map(allowed.widens, chain.nodes))
    note = ForChain(kernel.kernel.name, chain.calls, widens)
    return Replacement(chain, kernel, note)


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
