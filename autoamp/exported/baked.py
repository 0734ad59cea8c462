"""Gives a rewritten graph weights of its own, each in the precision that is read.

A graph that a converted model runs is handed low copies of fp32 weights.  An exported
graph holds the low weights instead, and an fp32 weight only where an op reads fp32.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from autoamp.dtypes import short_name
from autoamp.rewrite.copied import copied
from autoamp.rewrite.hoist_weight_casts import FOLDED


@dataclass(frozen=True)
class Baked:
    """A graph with weights of its own.

    Attributes:
        gm: the graph; it has the parameters and buffers that its ops read, no others.
        sources: for each weight of the graph, the path of the model's weight that it
            is, or that it is a cast of.
    """

    gm: fx.GraphModule
    sources: Mapping[str, str]


def baked(gm: fx.GraphModule, model: nn.Module) -> Baked:
    """`gm` with weights of its own, called by the paths that they have in `model`.

    A weight that is read in one precision keeps its path.  Of a weight that is read in
    two, the low one has the name of its dtype behind the path.

    Args:
        gm: a rewritten graph, whose casts of weights have been made constants.
        model: the model, whose tensors `gm` reads.
    """
    new, _ = copied(gm)
    reads = [n for n in new.graph.find_nodes(op="get_attr") if n.users]
    held = {n: operator.attrgetter(str(n.target))(new) for n in reads}
    values = {n: value for n, value in held.items() if isinstance(value, Tensor)}
    casts = _casts_of(gm, values)
    paths, saved = _paths(model), nn.Module.state_dict(model).keys()
    root = nn.Module()
    named: dict[object, str] = {}
    sources: dict[str, str] = {}
    wide = {_identity(v) for n, v in values.items() if n not in casts}
    for node, value in held.items():
        if node not in values:  # the body of a branch or of a loop
            setattr(root, str(node.target), value)
    for node, value in values.items():
        source = casts.get(node, value)
        key = (_identity(source), value.dtype, _lying(value))
        if key not in named:
            path = paths.get(_identity(source), str(node.target).replace(".", "_"))
            both = node in casts and _identity(source) in wide
            name = f"{path}_{short_name(value.dtype)}" if both else path
            named[key] = _free(name, sources)
            sources[named[key]] = path
            own = value.detach().clone() if source is value else value
            if isinstance(source, nn.Parameter):
                _put(root, named[key], nn.Parameter(own, requires_grad=False))
            else:
                _put(root, named[key], own, persistent=path in saved)
        node.target = named[key]
    for node in new.graph.find_nodes(op="get_attr"):
        if not node.users:
            new.graph.erase_node(node)
    made = fx.GraphModule(root, new.graph, type(gm).__name__)
    made.meta.update(gm.meta)
    return Baked(made, sources)


def _casts_of(
    gm: fx.GraphModule, values: Mapping[fx.Node, object]
) -> dict[fx.Node, Tensor]:
    """The constants that are casts of weights, each to the weight."""
    folded = gm.meta.get(FOLDED, {})
    return {
        node: operator.attrgetter(folded[str(node.target)])(gm)
        for node in values
        if str(node.target) in folded
    }


def _paths(model: nn.Module) -> dict[object, str]:
    """The first path of each parameter and buffer of a model."""
    found: dict[object, str] = {}
    held: Iterable[tuple[str, Tensor]] = (
        *nn.Module.named_parameters(model, remove_duplicate=False),
        *nn.Module.named_buffers(model, remove_duplicate=False),
    )
    for path, tensor in held:
        found.setdefault(_identity(tensor), path)
    return found


def _identity(tensor: Tensor) -> object:
    """Equal for two tensors that are the same elements in the same order."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)
    storage = tensor.untyped_storage().data_ptr()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return storage, tensor.dtype, *place


def _lying(tensor: Tensor) -> object:
    """The strides of a tensor, where it has any."""
    return tensor.stride() if tensor.layout is torch.strided else None


def _free(name: str, taken: Mapping[str, str]) -> str:
    number, found = 1, name
    while found in taken:
        number, found = number + 1, f"{name}_{number}"
    return found


def _put(root: nn.Module, path: str, value: Tensor, *, persistent: bool = True) -> None:
    """Makes `value` the parameter or the buffer `path` of `root`."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    else:
        root.register_buffer(name, value, persistent=persistent)
