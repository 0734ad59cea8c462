"""What an instrument at torch's dispatcher needs to know of the calls it sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountingDispatch(TorchDispatchMode):
    """A mode that sees every operator, and under which Dynamo still captures.

    A plain `TorchDispatchMode` makes Dynamo step aside, and a compiled or converted
    model then runs as plain fp32 without a word.  The two attributes below let Dynamo
    compile and run its graphs, higher-order operators included, under this mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether Dynamo may go on as if this mode were not there: yes."""
        return True


def has_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether an operator is one kernel on a device here, though torch may compose it.

    The backward of SiLU is such an operator.
    """
    keys = ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(op.name(), key) for key in keys)


def kept_by_function(node: Any) -> list[Any]:
    """All that a node of an `autograd.Function` keeps outside `save_for_backward`.

    That is the attributes of its context, and the closure of its backward, as Dynamo's
    own operator for a captured Function has one.  Nothing for a node of any other kind.
    """
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return []
    cells = type(node)._forward_cls.backward.__closure__ or ()  # type: ignore[attr-defined]
    return [vars(node), [cell.cell_contents for cell in cells]]
