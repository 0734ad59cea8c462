"""DTensors: the local part of a rank, and the calls that redistribute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from autoamp.compat.distributed import is_distributed

_OF_DTENSORS = frozenset({"redistribute", "to_local", "full_tensor"})
"""Methods of a DTensor that a plain tensor has not."""

FROM_LOCAL = "from_local"
"""The function that makes a DTensor of what each rank holds."""


def mesh_call(node: fx.Node) -> str:
    """The name of a call that crosses between DTensors and local parts; else "".

    Dynamo writes `DTensor.from_local` as a function, the others as methods.
    """
    if node.op == "call_method":
        return str(node.target) if node.target in _OF_DTENSORS else ""
    module, name = _home(node)
    if node.op != "call_function" or not module.startswith("torch.distributed.tensor"):
        return ""
    return name if name == FROM_LOCAL or name in _OF_DTENSORS else ""


def hides_mesh_call(node: fx.Node) -> bool:
    """Whether a node is such a call in a function that Dynamo made for it alone.

    Dynamo of torch 2.11 does so: the function holds the mesh and the placements, which
    no code of a graph can name.
    """
    module, name = _home(node)
    return module.startswith("torch._dynamo.") and name.startswith(_HIDDEN)


_HIDDEN = ("prim_redistribute", "prim_to_local", f"prim {FROM_LOCAL}")


def _home(node: fx.Node) -> tuple[str, str]:
    """The module and the name of the function that a node calls, "" where unknown."""
    target: Any = node.target
    return getattr(target, "__module__", None) or "", getattr(target, "__name__", "")


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a DTensor, with no history; another tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    value: Any = tensor
    return cast(torch.Tensor, value._local_tensor)


def with_memory(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A DTensor that lies on the mesh as `like`, of which this rank holds `memory`.

    A plain tensor `like` gives `memory` itself.
    """
    if not is_distributed(like):
        return memory
    given: Any = like
    return _like(given, memory, given.placements)


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Has two tensors, as Python knows them, stand for each other's content.

    Memory, dtype, gradient, version, and the node that accumulates the gradient with
    its hooks, go from one to the other.  Python's references, weak references and
    attributes stay where they are.

    Raises:
        RuntimeError: a weak reference of C++ is to one of the two.
    """
    torch._C._swap_tensor_impl(one, other)
    if is_distributed(one):
        for name in ("_local_tensor", "_spec"):
            held = getattr(one, name)
            setattr(one, name, getattr(other, name))
            setattr(other, name, held)


def scattered_sum(
    grad: Any, placements: Sequence[Any], dtype: torch.dtype
) -> torch.Tensor | None:
    """The sum over the ranks of a partial DTensor, in `dtype`, under `placements`.

    The ranks exchange their summands as they are, and each rank adds up its own part in
    `dtype`.  The result is None where the sum is not one over one dimension of the mesh
    whose parts are alike: then it is to be had by `redistribute`.
    """
    changed = [at for at, p in enumerate(grad.placements) if p != placements[at]]
    if len(changed) != 1:
        return None
    (along,) = changed
    partial, shard = grad.placements[along], placements[along]
    is_sum = partial.is_partial() and getattr(partial, "reduce_op", "") == "sum"
    if not (is_sum and shard.is_shard()):
        return None
    local, ranks, dim = own_memory(grad), int(grad.device_mesh.size(along)), shard.dim
    if type(shard).__name__ != "Shard" or local.shape[dim] % ranks:
        return None
    # `all_to_all_single` cuts dimension 0 of one block of memory.
    parts = local.movedim(dim, 0).contiguous()
    theirs = torch.empty_like(parts)
    try:
        group = grad.device_mesh.get_group(along)
        torch.distributed.all_to_all_single(theirs, parts, group=group)
    except RuntimeError as error:
        # A rank that is gone is no backend without this exchange: the others must hear.
        if "does not support" not in str(error).lower():
            raise
        return None
    each = theirs.view(ranks, parts.shape[0] // ranks, *parts.shape[1:])
    # The summands are low, as they were sent; only the sum has more digits.
    summed = each.sum(0, dtype=dtype).movedim(0, dim).contiguous()
    return _like(grad, summed, tuple(placements))


def _like(given: Any, memory: torch.Tensor, placements: Any) -> torch.Tensor:
    """A DTensor as large as `given`, on its mesh."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        memory,
        given.device_mesh,
        placements,
        run_check=False,  # a check is a broadcast among the ranks
        shape=given.shape,
        stride=given.stride(),
    )
