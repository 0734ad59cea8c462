"""New tensors that the model's code makes in the dtype of another value.

`torch.empty(n, dtype=x.dtype)` arrives in a graph as a tensor of fp32, since `x` is
fp32 at capture; under `torch.autocast` it is low wherever `x` is.  Torchvision draws
the masks of stochastic depth so, and a mask in fp32 would widen the residual stream.

A graph does not hold the expression, so the source line of the call is read.  Only the
plain case counts: `dtype=NAME.dtype` stands in the line, and all that read the tensor
are pointwise calls of the same function, in lines that have NAME too, beside one other
value that was there before the tensor.  Where anything differs, fp32 is what was asked
for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import source_line
from autoamp.dtypes import HIGH_DTYPE
from autoamp.op_names import base_name
from autoamp.ops import is_inplace, is_pointwise
from autoamp.rules import family

_TYPED = re.compile(r"\bdtype\s*=\s*([A-Za-z_]\w*)\.dtype\b")


def typed_as(gm: fx.GraphModule) -> Mapping[str, str]:
    """Each new tensor made in the dtype of a value, by name, to the value's name."""
    found: dict[str, str] = {}
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        name = _asked(node)
        if not name:
            continue
        values = {_beside(node, reader, name) for reader in _readers(node)}
        value = values.pop() if len(values) == 1 else None
        if value is not None and order[value] < order[node]:
            found[node.name] = value.name
    return found


def _asked(node: fx.Node) -> str:
    """The NAME of `dtype=NAME.dtype` in the line that made a new fp32 tensor, or ""."""
    if not isinstance(node.target, compat.OpOverload) or node.all_input_nodes:
        return ""
    if base_name(node.target) not in family("factory"):
        return ""
    if not _is_high(node) or node.kwargs.get("dtype") is not HIGH_DTYPE:
        return ""
    names = set(_TYPED.findall(source_line(node)))
    return names.pop() if len(names) == 1 else ""


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that read a new tensor, after all that writes to it in place."""
    for user in node.users:
        if _writes_to(user, node):
            yield from _readers(user)
        else:
            yield user


def _writes_to(call: fx.Node, node: fx.Node) -> bool:
    """Whether a call changes a tensor in place and reads no other."""
    target = call.target
    in_place = isinstance(target, compat.OpOverload) and is_inplace(target)
    return in_place and call.args[0] is node and call.all_input_nodes == [node]


def _beside(made: fx.Node, reader: fx.Node, name: str) -> fx.Node | None:
    """The other value that a pointwise call reads, in a line of the same function."""
    target = reader.target
    if not isinstance(target, compat.OpOverload) or not is_pointwise(target):
        return None
    code = source_line(reader)
    if _function(reader) != _function(made) or not re.search(rf"\b{name}\b", code):
        return None
    storage = compat.storage_id(made.meta["val"])
    others = [
        n
        for n in reader.all_input_nodes
        if _is_high(n) and compat.storage_id(n.meta["val"]) != storage
    ]
    return others[0] if len(others) == 1 else None


def _function(node: fx.Node) -> str:
    """The file and the function of the innermost frame: `File "m.py" in forward`."""
    frames = [
        line.strip()
        for line in (node.stack_trace or "").splitlines()
        if line.strip().startswith("File ")
    ]
    return re.sub(r", line \d+,", "", frames[-1]) if frames else ""


def _is_high(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE
