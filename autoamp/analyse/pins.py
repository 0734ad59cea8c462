"""Why a node must stay fp32 whatever its op's category: facts about this very call."""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts, NodeFacts, argument, tensors_of
from autoamp.analyse.numbers import Known, filling, numbers
from autoamp.dtypes import largest, short_name, smallest
from autoamp.ops import FACTORIES, base_name, is_pointwise
from autoamp.rules import Category

LAYER_NORMS = frozenset({"aten::layer_norm", "aten::native_layer_norm"})

LAYER_NORM_ROWS = 256
"""Rows beyond which a sum of ones is no longer exact in bf16 (8 bits).

On torch 2.13's CPU a bf16 layer norm gave 512 as the weight gradient over 16000 rows of
ones, an fp16 one 4096."""

_GATHERS = frozenset(
    {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
)

_NORMS_WITH_STATISTICS = frozenset(
    f"aten::{name}"
    for name in (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_fused_rms_norm",
        "_weight_norm_interface",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_impl_index",
        "_batch_norm_no_update",
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
    )
)
"""Norms that give statistics after their output.

For low data torch 2.13 makes these in fp32 or in the low dtype, by device and by the
dtype of the weight; its fake and meta tensors say other dtypes than kernels give."""

_LIMITED = frozenset(
    f"aten::{name}"
    for name in (
        "clamp",
        "clip",
        "hardtanh",
        "masked_fill",
        "maximum",
        "minimum",
        "nan_to_num",
        "where",
    )
)
"""Ops that take limits or fillings, in whichever category a user puts them."""


def pin_reason(
    node: fx.Node, fact: NodeFacts, graph: Facts, keep: Sequence[str]
) -> str | None:
    """Why this call must stay fp32, or None.

    Args:
        keep: the user's module-path patterns.
    """
    for pattern in keep:
        if any(fnmatch.fnmatchcase(m, pattern) for m in fact.modules or ("",)):
            return f"kept in fp32 by keep={pattern!r}"
    if fact.autocast is not None:
        state = "on" if fact.autocast else "off"
        return f"inside the model's own torch.autocast region, switched {state}"
    if fact.mixes_floats:
        return "has operands of another float dtype: left as the user wrote it"
    assert isinstance(node.target, compat.OpOverload)
    if torch.Tag.nondeterministic_seeded in node.target.tags and not fact.operands:
        return "draws random numbers: another dtype would draw others"
    if (
        fact.makes_floats
        and not fact.operands
        and base_name(node.target) not in FACTORIES
    ):
        return (
            "makes fp32 of what is no float: its dtype is not the rewrite's to choose"
        )
    if fact.storage in graph.written_opaquely:
        return "a function that is not looked into may write to it"
    if fact.storage in graph.mutated and fact.storage in graph.outside:
        return "writes to, or views, a tensor that exists outside the graph"
    if base_name(node.target) in _NORMS_WITH_STATISTICS and _reads_beyond_first(node):
        return "its statistics are read, whose dtype would be the kernel's choice"
    return None


def _reads_beyond_first(node: fx.Node) -> bool:
    """Whether anything but the first of a node's results is read."""
    return not all(
        user.target is operator.getitem and user.args[1] == 0 for user in node.users
    )


def scales(target: compat.OpOverload, category: Category) -> bool:
    """Whether an op does arithmetic with its numbers: none is a limit or a filling."""
    limited = category is Category.CLEAR or base_name(target).rstrip("_") in _LIMITED
    return is_pointwise(target) and not limited


def literal_reason(
    node: fx.Node, low: torch.dtype, known: Known, category: Category
) -> str | None:
    """Why arithmetic with a number beyond the range of `low` must stay fp32, or None.

    A limit or a filling may be cut off at the range; a factor or a divisor may not.
    None may become zero: `functional.normalize` divides by what it keeps above 1e-12.

    Args:
        known: the numbers that tensors hold.
        category: the op's; clear ops do no arithmetic.
    """
    target = node.target
    assert isinstance(target, compat.OpOverload)
    filled = filling(node, known)
    if filled is None and not is_pointwise(target):
        return None
    for value in numbers(node, known) if filled is None else (filled,):
        if not math.isfinite(value):
            continue
        if 0 < abs(value) <= smallest(low) / 2:
            return f"computes with {value:g}, which {short_name(low)} rounds to zero"
        if abs(value) > largest(low) and filled is None and scales(target, category):
            return f"computes with {value:g}, which is beyond {short_name(low)}'s range"
    return None


def cut_off(node: fx.Node, low: torch.dtype, known: Known) -> bool:
    """Whether a call fills a tensor with a number beyond the range of `low`.

    In `low` it were another number: one to mask with, not one to divide by.
    """
    filled = filling(node, known)
    return filled is not None and largest(low) < abs(filled) < math.inf


def gradient_reason(node: fx.Node, fact: NodeFacts, graph: Facts) -> str | None:
    """Why the backward of this call must be fp32, or None.

    Its kernel would sum many gradients in the low dtype.  The result may be rounded: no
    more than any other does it widen what follows.
    """
    assert isinstance(node.target, compat.OpOverload)
    base = base_name(node.target)
    if not fact.requires_grad:
        return None
    if base in _GATHERS and fact.operands:
        table = fact.operands[0].value
        if table in graph.weights and graph.nodes[table].requires_grad:
            return (
                "its backward sums the gradients of rows used many times in the "
                "dtype of the table"
            )
    if base in LAYER_NORMS and fact.device == "cpu" and len(fact.operands) > 1:
        size = math.prod(compat.hint(s) for s in argument(node, "normalized_shape"))
        unknown = any(not isinstance(s, int) for s in _output_shape(node))
        if unknown or fact.numel >= LAYER_NORM_ROWS * size:
            return (
                "torch's CPU kernel sums its weight gradient over the rows in the low "
                "dtype"
            )
    return None


def _output_shape(node: fx.Node) -> Sequence[object]:
    """The sizes of the first output; symbolic ones stand for any number."""
    return tuple(tensors_of(node.meta["val"])[0].shape)
