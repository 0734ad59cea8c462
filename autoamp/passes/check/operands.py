"""Which operand dtypes an op accepts, stated a second time, for `verify` alone.

A node and the stand-in runs of the original and the rewritten graph go in; a
`VerificationError` comes out where the node mixes float dtypes.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.check.standin import StandIns, dtypes_of, named, where
from autoamp.passes.functions import STATE, WITH_FP32_STATE, op_with_its_state
from autoamp.passes.ops import is_custom

_CONVERTS = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::type_as"})
"""Ops whose job is to take one dtype and give another."""

_CPU_FP32_PARAMETERS = {
    name: frozenset({"weight", "bias"})
    for name in (
        "aten::layer_norm",
        "aten::native_layer_norm",
        "aten::group_norm",
        "aten::native_group_norm",
        "aten::rms_norm",
    )
}
"""Operands that the op's CPU kernels, but not its CUDA kernels, take in fp32.

CUDA kernels want these parameters in the dtype of the data."""

_FP32_PARAMETERS = {
    name: frozenset({"weight", "bias", "running_mean", "running_var"})
    for name in (
        "aten::batch_norm",
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::instance_norm",
        "aten::miopen_batch_norm",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit_functional",
        "aten::_native_batch_norm_legit_no_training",
        "aten::_batch_norm_impl_index",
        "aten::_batch_norm_no_update",
        "aten::_batch_norm_with_update",
        "aten::_batch_norm_with_update_functional",
    )
}
"""Operands that the op's kernels on every device take in fp32 beside low data."""


_WIDEN = frozenset(
    f"aten::{name}"
    for name in (
        "add",
        "addcmul",
        "div",
        "maximum",
        "minimum",
        "mul",
        "sub",
        "true_divide",
        "where",
    )
)
"""Ops whose kernels widen a low operand as they read it, which is exact."""


def operands_agree(node: fx.Node, after: StandIns, before: StandIns) -> None:
    """Raises if `node` reads float dtypes that eager rejects or silently promotes."""
    if node.target in WITH_FP32_STATE.values():
        _state_is_fp32(node, after)
    if not isinstance(node.target, compat.OpOverload):
        return
    name = compat.schema(node.target).name
    if name in _CONVERTS or is_custom(node.target):  # its author may want two dtypes
        return
    exempt = _FP32_PARAMETERS.get(name, frozenset())
    values = [n.meta.get("val") for n in node.all_input_nodes]
    if all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor)):
        # CUDA's kernels of norms reject fp32 parameters beside low data.
        exempt |= _CPU_FP32_PARAMETERS.get(name, frozenset())
    found = _operand_dtypes(node, after, exempt)
    if len(set(found.values())) <= 1:
        return
    widened = dtypes_of(after.values[node.name]) == [torch.float32]
    one_is_wide = torch.float32 in found.values()
    # The widening of the low operand is exact, and the sum is made in fp32.
    if name in _WIDEN and widened and one_is_wide:
        return
    twin = before.nodes.get(node.name)
    if twin is not None and _operand_dtypes(twin, before, exempt) == found:
        return  # the user mixed the dtypes, and the rewrite left them alone
    raise VerificationError(
        f"{where(node)} has operands of different dtypes: "
        + ", ".join(f"{k}: {v}" for k, v in found.items()),
        nodes=named(node),
    )


def _state_is_fp32(node: fx.Node, after: StandIns) -> None:
    """Raises unless the op reads its state in fp32 and its first weight low.

    All else is low or is cast inside: each step, or each direction, casts by itself.
    """
    op = op_with_its_state(node.target)
    names = compat.argument_names(op)
    read: dict[str, list[torch.dtype]] = {}
    for name, value in zip(names, node.args, strict=False):
        operands: list[fx.Node] = []
        fx.map_arg(value, operands.append)
        floats = [d for n in operands for d in dtypes_of(after.values[n.name])]
        read[name] = [d for d in floats if d.is_floating_point]
    state = set(read.pop(STATE))
    low = read["params" if "params" in read else "w_ih"][0]
    others = set().union(*read.values())
    if state != {torch.float32} or low == torch.float32 or others - {low, *state}:
        raise VerificationError(
            f"{where(node)} reads {others}, and a state of {state}",
            nodes=named(node),
        )


def _operand_dtypes(
    node: fx.Node, run: StandIns, exempt: Collection[str]
) -> dict[str, torch.dtype]:
    """Argument names to dtypes, for float operands that take part in type promotion."""
    assert isinstance(node.target, compat.OpOverload)
    names = compat.argument_names(node.target)
    arguments = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    pointwise = torch.Tag.pointwise in node.target.tags
    found: dict[str, torch.dtype] = {}
    dims: dict[str, int] = {}
    for name, value in arguments:
        leaves: list[fx.Node] = []
        fx.map_arg(value, leaves.append)
        for i, leaf in enumerate(leaves):
            tensor = run.values[leaf.name]
            floats = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if floats and name not in exempt:
                found[f"{name}[{i}]" if i else name] = tensor.dtype
                dims[f"{name}[{i}]" if i else name] = tensor.dim()
    if pointwise and any(dims.values()):
        # Beside tensors with dimensions, 0-dim float tensors do not decide the dtype.
        found = {k: v for k, v in found.items() if dims[k]}
    # `lerp_` takes one dtype only.
    mixes = pointwise and compat.schema(node.target).name != "aten::lerp_"
    if mixes and names[0] in compat.written_arguments(node.target):
        # The written operand keeps its dtype; the kernel takes the others as they are.
        found = {k: v for k, v in found.items() if k == names[0]}
    return found


def reads_as_it_comes(node: fx.Node) -> bool:
    """Whether an op converts its operand itself, or reads only the operand's shape."""
    if not isinstance(node.target, compat.OpOverload):
        return False
    name = compat.schema(node.target).name
    shape_only = name.endswith("_like") or name.startswith("aten::new_")
    asks = torch.float32 in (*node.args, *node.kwargs.values())
    return shape_only or asks or name in _CONVERTS


def read_dtypes(node: fx.Node, run: StandIns) -> list[torch.dtype]:
    """The dtypes of the float operands that an op computes with."""
    if isinstance(node.target, compat.OpOverload):
        return list(_operand_dtypes(node, run, ()).values())
    values = [run.values[n.name] for n in node.all_input_nodes]
    return [d for v in values for d in dtypes_of(v) if d.is_floating_point]
