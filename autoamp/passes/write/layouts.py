"""Chooses which images and volumes have their channels last, and lays them out.

The choice is a min-cut.  Kernels of 16-bit convolutions compute with the channels last,
and permute an operand that lies otherwise, at each call.  The source side is channels
last, the sink side is the layout that the graph was captured with:

* a convolution on the sink side costs the permutations of images in its products, one
  forward and two backward;
* on the source side it costs those of its weight: in the products, and of the copy and
  the gradient at each step of a training;
* an op that keeps the layout of its operand costs nothing on either side;
* a norm or a linear layer that reads the channels of an image as rows, through a view,
  costs a copy forward and one backward on the sink side, where rows are not in memory;
* a value that the captured graph itself has with its channels last stands on the source
  side, and is read there as it is captured, by whichever side;
* any other op, and everything outside the graph, stands on the sink side;
* a value that is read on both sides is permuted once;
* calls that keep one value for the backward stand on one side: it is kept once.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES
from autoamp.passes.decide.devices import Device
from autoamp.passes.decide.mincut import Group, Problem, solve
from autoamp.passes.functions import (
    laid_out,
    layer_norm,
    low_weight,
    low_weight_unscaled,
    rms_norm,
)
from autoamp.passes.ops import base_name, is_inplace, is_pointwise, is_random, is_view
from autoamp.passes.rules import family
from autoamp.passes.see.facts import Facts
from autoamp.passes.see.nodes import written_values
from autoamp.passes.write.copied import copied

_OUTSIDE = "outside"
_WEIGHT = 1
"""The position of the weight among a convolution's arguments."""

_USES = (low_weight, low_weight_unscaled)

_ATEN = torch.ops.aten
_PACKS = (_ATEN.layer_norm.default, layer_norm, rms_norm, _ATEN.linear.default)
"""Calls that copy their first operand where it is not contiguous, and whose results do
not tell how it lay.  Torch's own `rms_norm` is not one on every device."""

_IN_KERNELS, _IN_COPIES = 0.5, 1.5
"""How long permutations take, as parts of the time that memory takes at its bandwidth.

Measured on a CPU with avx512_bf16: with the channels last, the three products of a
convolution save 1.35 to 1.7 times that time of the images; a copy made by torch takes
1.3 to 1.5 times that time (benchmarks/results/layouts.md).
"""

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format with the channels last, by the number of dimensions."""

LAST = "autoamp_channels_last"
"""In the `meta` of a value or copy of a weight that has its channels last: True."""


@dataclass(frozen=True)
class Layouts:
    """The choice for one graph.

    Attributes:
        last: the nodes whose values have their channels last.
        weights: the copies of weights that have their channels last.
        changes: each value that is permuted, to the readers of the permuted value.
    """

    last: frozenset[fx.Node]
    weights: frozenset[fx.Node]
    changes: dict[fx.Node, list[fx.Node]]


def choose_layouts(
    graph: fx.Graph,
    copies: Sequence[fx.Node],
    device: Device,
    facts: Facts,
    left: Collection[str] = (),
) -> Layouts | None:
    """The layouts of least cost; None where no convolution gains.

    Args:
        graph: a graph with its casts, ready to run.
        copies: the inputs and constants that are low copies of weights, whose layout
            can change.
        device: the device the graph runs on.
        facts: the facts of the captured nodes.
        left: names of nodes that keep the layout they have.
    """
    convolutions = {n: w for n in graph.nodes if (w := _weight(n, copies)) is not None}
    # Without a convolution that gains, a permutation is a loss.
    if not convolutions or not device.channels_last:
        return None
    seen = _Seen(graph, convolutions, device, facts, left)
    problem = seen.problem()
    source = solve(problem).source
    images, lying, rows = seen.images, seen.lying, seen.rows
    nodes = {n.name: n for n in images}
    last = {n for n in images if n.name in source}
    weights = seen.laid_anew(last)
    # Calls whose values lie last as captured read their operands as captured.
    read_last = {n for n in last | rows if n.name in source} - lying
    changes = {}
    for group in problem.groups:
        node = nodes[group.key[0]]
        readers = _image_readers(node)
        other = [r for r in readers if (r in read_last) != (node in last)]
        if other and not (node not in last and _lies_both_ways(images[node])):
            changes[node] = other
    changed = frozenset(
        n for n in last - rows if n not in lying or convolutions.get(n) in weights
    )
    return Layouts(changed, weights, changes) if changed & convolutions.keys() else None


def lay_out(gm: fx.GraphModule, layouts: Layouts) -> fx.GraphModule:
    """A copy of `gm` that permutes the values read in the other layout, each once.

    Copies of weights have their channels last (`training/weight_copies.py`),
    those that are constants are made anew here, and the results of the calls follow the
    layouts of their operands.
    """
    gm, copies = copied(gm)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for value, readers in layouts.changes.items():
        node = copies[value]
        last = FORMATS[node.meta["val"].dim()]
        formats = (last, torch.contiguous_format)
        if value in layouts.last:
            formats = (torch.contiguous_format, last)
        after = inputs[-1] if node.op == "placeholder" else node
        with gm.graph.inserting_after(after):
            copy = gm.graph.call_function(laid_out, (node, *formats))
        copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        for reader in readers:
            copies[reader].replace_input_with(node, copy)
    for node in (copies[each] for each in layouts.last | layouts.weights):
        node.meta[LAST] = True
        if node.op == "get_attr":
            name = str(node.target)
            constant = getattr(gm, name)
            last = FORMATS[constant.dim()]
            gm.register_buffer(name, constant.contiguous(memory_format=last))
    return gm


def convolved(graph: fx.Graph, copies: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The copies of weights with which images are convolved."""
    found = (_weight(node, copies) for node in graph.nodes)
    return frozenset(w for w in found if w is not None and w.meta["val"].dim() == 4)


class _Seen:
    """The values of a graph that have a layout, and the min-cut that chooses it.

    Attributes:
        images: each value with images, or volumes, and its fake tensor.
        convolutions: the low ones, with the copy each reads as its weight.
        lying: the images that have their channels last in the captured graph.
        rows: the views through which calls read the channels of an image as rows.
        flows: the nodes that a gradient flows through.
    """

    def __init__(
        self,
        graph: fx.Graph,
        convolutions: dict[fx.Node, fx.Node],
        device: Device,
        facts: Facts,
        left: Collection[str],
    ) -> None:
        self.graph, self.convolutions, self.facts = graph, convolutions, facts
        self.device, self.left = device, left
        self.images = {n: n.meta["val"] for n in graph.nodes if _is_image(n)}
        self.lying = frozenset(n for n, v in self.images.items() if _is_laid_last(v))
        self.flows: set[fx.Node] = set()
        for node in graph.nodes:
            fact = facts.nodes.get(node.name)
            # A node that was added after the capture is as its operands are.
            if fact.requires_grad if fact else self.flows & {*node.all_input_nodes}:
                self.flows.add(node)
        self.rows = frozenset(
            reader
            for node in self.images.keys() - self.lying
            for reader in _image_readers(node)
            if _packs(node, reader, left)
        )

    def laid_anew(self, last: Collection[fx.Node]) -> frozenset[fx.Node]:
        """The weights that are read with the channels last, and lie otherwise."""
        kept = {
            weight
            for node, weight in self.convolutions.items()
            if node not in last or node.name in self.left
        }
        return frozenset(
            weight
            for weight in self.convolutions.values()
            if weight not in kept
            and not _lies_both_ways(weight.meta["val"])
            and not _is_laid_last(weight.meta["val"])
        )

    def problem(self) -> Problem:
        """The problem, whose source side has the channels last."""
        unary = {node.name: (0, 0) for node in self.images} | {_OUTSIDE: (0, 0)}
        at_sink = {_OUTSIDE: "is outside the graph, where layouts are the user's"}
        at_source = {n.name: "has its channels last as captured" for n in self.lying}
        ties: list[tuple[str, str, str]] = []
        for node, value in self.images.items():
            if node in self.lying:
                continue
            for written in written_values(node):
                ties.append((written.name, node.name, "is written in place"))
            if node.name in self.left:
                at_sink[node.name] = "failed a check with the channels last"
            elif node in self.rows:
                continue
            elif node in self.convolutions:
                unary[node.name] = self._convolving(node)
                filters = self.convolutions[node].meta["val"].shape
                is_wide = filters[1] == 1 and compat.hint(filters[-1]) >= _WIDE
                if self.device.type == "cpu" and is_wide:
                    at_sink[node.name] = "may hang with the channels last"
            elif not _keeps_layout(node):
                at_sink[node.name] = "is written for the layout it has"
            if not _is_plain(value):
                at_sink[node.name] = "has no plain layout in the captured graph"
        for node in self.rows:
            unary[node.name] = round(self._copying(node.all_input_nodes[0])), 0
        ties = [(a, b, why) for a, b, why in ties if a in unary and a not in at_source]
        groups = [*self._groups()]
        ties += [*self._shared(), *self._kept_once()]
        return Problem(unary, at_sink, at_source, groups, ties)

    def _shared(self) -> Iterator[tuple[str, str, str]]:
        """The convolutions that read one weight, which has one layout."""
        readers: dict[fx.Node, list[str]] = defaultdict(list)
        for node, weight in self.convolutions.items():
            if node not in self.lying:
                readers[weight].append(node.name)
        for names in readers.values():
            for one, other in itertools.pairwise(names):
                yield one, other, "reads the same weight"

    def _convolving(self, node: fx.Node) -> tuple[int, int]:
        """The prices of a convolution as captured, and with the channels last."""
        read = node.args[_WEIGHT]
        trained = isinstance(read, fx.Node) and read.target in _USES
        # Forward, gradient of the data and gradient of the weight; the copy of the
        # weight is permuted at each step, and its gradient back.
        products, copies = (3, 2) if trained else (1, 0)
        images = self._moving(node.all_input_nodes[0]) + self._moving(node)
        last = products * _IN_KERNELS + copies * _IN_COPIES
        weight = self._moving(self.convolutions[node])
        return round(products * _IN_KERNELS * images), round(last * weight)

    def _groups(self) -> Iterator[Group]:
        """The readers of each image, which may share a permuted copy made at once.

        Where a gradient flows, a change of layout permutes the gradient too.  None
        flows to the caller's images: they are permuted after they are cast down, as
        fewer bytes.
        """
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        written: dict[int, int] = {}
        for node, at in order.items():
            for each in written_values(node):
                if isinstance(each.meta.get("val"), Tensor):
                    written[compat.storage_id(each.meta["val"])] = at
        known = (self.images.keys() | self.rows) - self.lying
        for node, value in self.images.items():
            readers = _image_readers(node)
            if not readers or node in self.lying or node in self.rows:
                continue
            price: int | None = round(
                self._copying(node, start=10 * self.device.launch_ns)
            )
            # The price None forbids the copy.
            if written.get(compat.storage_id(value), -1) > order[node]:
                price = None  # a copy made now would miss the write
            names = tuple(r.name if r in known else _OUTSIDE for r in readers)
            # One channel, or one pixel: both layouts are the same memory, and no copy
            # is made.
            free = 0 if price is not None and _lies_both_ways(value) else price
            yield Group((node.name, 0, 0), node.name, names, free, price)

    def _kept_once(self) -> Iterator[tuple[str, str, str]]:
        """The calls that keep one image for their backwards, which has one layout."""
        known = self.images.keys() - self.lying
        for node, value in self.images.items():
            if node in self.lying or _lies_both_ways(value):
                continue
            captured = node
            # Captured as the value that it is a cast of.
            while captured.name not in self.facts.nodes and captured.all_input_nodes:
                captured = captured.all_input_nodes[0]
            kept = self.facts.kept
            keepers = [
                reader.name if reader in known else _OUTSIDE
                for reader in _image_readers(node)
                if reader.name in kept and captured.name in kept[reader.name].operands
            ]
            if node.name in kept and kept[node.name].result:
                keepers.append(node.name)
            for one, other in itertools.pairwise(keepers):
                yield one, other, "keeps the same image for the backward"

    def _copying(self, image: fx.Node, start: float = 0.0) -> float:
        """The price of a permuted copy, and of that of its gradient if one flows."""
        copies = 2 if image in self.flows else 1
        return copies * (_IN_COPIES * self._moving(image) + start)

    def _moving(self, node: fx.Node) -> int:
        """The price of reading and writing a value, in units of 0.1 ns."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return 0
        numel = math.prod(compat.hint(size) for size in value.shape)
        return round(10 * 2 * value.element_size() * numel / self.device.bytes_per_ns)


def _weight(node: fx.Node, copies: Collection[fx.Node]) -> fx.Node | None:
    """The copy that a 16-bit convolution reads as its weight, if no other op does."""
    if not _is_convolution(node) or not _is_image(node):
        return None
    if node.meta["val"].dtype not in LOW_DTYPES.values():
        return None
    read = node.args[_WEIGHT]
    copy = read.args[1] if isinstance(read, fx.Node) and read.target in _USES else read
    if not isinstance(copy, fx.Node) or copy not in copies:
        return None
    for user in copy.users:
        for reader in user.users if user.target in _USES else [user]:
            # One copy has one layout: an op that is no convolution reads it as it was.
            if not _is_convolution(reader):
                return None
            weight = reader.args[_WEIGHT]
            # The weight is read as data too, and has to lie as data does.
            if sum(each is weight or each is copy for each in reader.args) != 1:
                return None
    return copy


def _is_convolution(node: fx.Node) -> bool:
    if not isinstance(node.target, compat.OpOverload) or len(node.args) <= _WEIGHT:
        return False
    return base_name(node.target) in family("convolution", "transposed_convolution")


_WIDE = 15
"""OneDNN 3.12, of torch 2.13, never ends on 16 filters of 1 x 15, depthwise, over 32
columns with the channels last; 13 columns end, and so do 96 filters of 31."""


def _is_image(node: fx.Node) -> bool:
    value = node.meta.get("val")
    is_tensor = isinstance(value, Tensor) and value.is_floating_point()
    return is_tensor and value.dim() in FORMATS  # type: ignore[union-attr]


def _image_readers(node: fx.Node) -> list[fx.Node]:
    """The calls that read an image as an image; a weight is none."""
    return [
        user
        for user in node.users
        if not (_is_convolution(user) and node not in user.args[:1])
        and user.target not in _USES
    ]


def _packs(image: fx.Node, view: fx.Node, left: Collection[str]) -> bool:
    """Whether all that reads `image` through `view` reads its channels as rows.

    Then each reader's operand is contiguous if the image has its channels last, and has
    to be copied if the image lies as captured.
    """
    value = image.meta["val"]
    if view.name in left or not _is_view_of(view, image):
        return False
    if not _is_plain(value) or _lies_both_ways(value):
        return False
    shape = [compat.hint(size) for size in value.shape]
    plain = torch.empty(shape, dtype=value.dtype, device="meta")
    last = plain.contiguous(memory_format=FORMATS[plain.dim()])
    through = [(view, plain, last)]
    while through:
        node, *shown = through.pop()
        shows: Any = node.target
        try:
            plain, last = (shows(each, *node.args[1:]) for each in shown)
        except RuntimeError:  # the view shows one of the layouts only
            return False
        if any(map(_is_copy, (plain, last), shown)):
            return False  # `reshape` copies one layout: it would miss a later write
        for user in node.users:
            if user.name in left:
                return False
            if _is_view_of(user, node):
                through.append((user, plain, last))
            # The reader has to pack the value that it reads as its first operand only.
            elif (
                user.target not in _PACKS
                or [at for at, read in enumerate(user.args) if read is node] != [0]
                or plain.is_contiguous()
                or not last.is_contiguous()
            ):
                return False
    return bool(view.users)


def _is_copy(result: Any, read: Tensor) -> bool:
    """Whether a call gave memory of its own; one that gives several tensors counts."""
    shares = isinstance(result, Tensor) and (
        compat.storage_id(result) == compat.storage_id(read)
    )
    return not shares


def _is_view_of(node: fx.Node, read: fx.Node) -> bool:
    """Whether a call shows the value that it reads, and only that one, otherwise."""
    target = node.target
    return (
        isinstance(target, compat.OpOverload)
        and is_view(target)
        and base_name(target) not in family("cast")
        and node.all_input_nodes == [read]
        and node.args[0] is read
        and not node.kwargs
    )


def _keeps_layout(node: fx.Node) -> bool:
    """Whether a call lays its result out as its operands, all of them alike, are."""
    target = node.target
    if not isinstance(target, compat.OpOverload) or is_random(target):
        return False
    # Such a call names its layout, whatever its operand's is.
    if "memory_format" in node.kwargs or base_name(target) in family("lays_out"):
        return False
    if is_view(target) and not is_inplace(target):
        return base_name(target) in family("cast")
    return is_pointwise(target) or base_name(target) in family("keeps_layout", "cast")


def _is_plain(value: Tensor) -> bool:
    """Whether an image is contiguous; the number of images may be symbolic."""
    expected = 1
    for at in reversed(range(value.dim())):
        size, stride = value.shape[at], value.stride(at)
        # The stride of a dimension of size 1 is arbitrary, and tells nothing of the
        # layout.
        if not isinstance(stride, int) or (stride != expected and size != 1):
            return False
        if not isinstance(size, int):
            return at == 0
        expected *= max(size, 1)
    return True


def _is_laid_last(value: Tensor) -> bool:
    """Whether the channels of an image are last already, of more than one pixel."""
    strides = value.stride()
    return strides[1] == 1 and isinstance(strides[-1], int) and strides[-1] > 1


def _lies_both_ways(value: Tensor) -> bool:
    """Whether an image has one channel, or one pixel: its two layouts are one."""
    channels, *sizes = value.shape[1:]
    return all(isinstance(s, int) and s == 1 for s in sizes) or (
        isinstance(channels, int) and channels == 1
    )
