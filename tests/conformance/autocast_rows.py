"""The rows of torch's own autocast tests, run by autocast and by our pass.

A row names an op, its arguments and, by the list it is in, the dtype it must compute
in.  An argument that a row has in half precision stands for a value some op above has
left low; our pass lowers only what it computed itself, so such an argument becomes the
fp32 tensor times one by `prelu`, which both devices' lists run low.

    python -m tests.conformance.autocast_rows cuda float16

prints one line of JSON per row, on fake tensors: no GPU is needed.  It is to be a
process of its own, because what goes wrong with fake CUDA tensors may abort it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import autocast_test_lists
from torch.utils import _pytree as pytree

import autoamp
from tests.fake_cuda import autocast
from tests.strategies import capture

HALF = (torch.float16, torch.bfloat16)
BANNED = "banned"


@dataclass(frozen=True)
class Row:
    """One row of one list, with its half-precision arguments in `low`."""

    name: str
    device: str
    low: torch.dtype
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    says: torch.dtype | None
    """What it must compute in; None for an op that autocast refuses."""


def rows(device: str, low: torch.dtype, on: str = "") -> Iterator[Row]:
    """Every row of the lists of `device`, "cpu" or "cuda".

    Args:
        on: the device of the tensors; by default `device`.
    """
    kind = "AutocastTestLists" if device == "cuda" else "AutocastCPUTestLists"
    on = on or {"cuda": "cuda:0"}.get(device, device)
    lists = vars(getattr(autocast_test_lists, kind)(on))
    for list_name, entries in lists.items():
        for index, (op, *given) in enumerate(entries):
            function = _function(list_name, op)
            args, kwargs = _arguments(op, given)
            args = pytree.tree_map(lambda a: _in_low(a, low), args)
            name = f"{list_name}-{index}-{op}"
            says = _says(list_name, low)
            yield Row(name, device, low, function, args, kwargs, says)


def _function(list_name: str, op: str) -> Callable[..., Any]:
    homes = {
        "methods": Tensor,
        "nn": torch._C._nn,
        "linalg": torch._C._linalg,
        BANNED: torch._C._nn,
    }
    function: Callable[..., Any]
    function = getattr(homes.get(list_name.partition("_")[0], torch), op)
    return function


def _arguments(op: str, given: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if op == "einsum":
        # The row's equation is of tensors of rank 4 and its matrices are of rank 2;
        # torch's test takes them for a reason to skip.
        return ("ij,jk->ik", *given[1]), {}
    kwargs = given[1] if len(given) > 1 and isinstance(given[1], dict) else {}
    return tuple(given[0]), kwargs


def _in_low(value: Any, low: torch.dtype) -> Any:
    halved = isinstance(value, Tensor) and value.dtype in HALF
    return value.to(low) if halved else value


def _says(list_name: str, low: torch.dtype) -> torch.dtype | None:
    if list_name == BANNED:
        return None
    return low if list_name.endswith(("_fp16", "_16")) else torch.float32


class _Call(nn.Module):
    """Calls a row's op on fp32 tensors, after `prelu` where the row's are half."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row = row

    def forward(self, one: Tensor, *tensors: Tensor) -> Any:
        rest = iter(tensors)

        def given(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            tensor = next(rest)
            return torch.prelu(tensor, one) if value.dtype in HALF else tensor

        args = pytree.tree_map(given, self.row.args)
        return self.row.function(*args, **self.row.kwargs)


def rewritten(row: Row, **options: Any) -> fx.GraphModule:
    """The row's op under autocast's own lists and its own rule of the widest."""
    tensors = [t for t in pytree.tree_leaves(row.args) if isinstance(t, Tensor)]
    given = [t.float() if t.is_floating_point() else t for t in tensors]
    return autoamp.rewrite(
        capture(_Call(row), len(given) + 1),
        [torch.ones(1, device=given[0].device), *given],
        precision=row.low,
        rules=f"torch-{row.device}",
        placement="promote",
        do_no_harm=False,
        **options,
    )


def computes_in(gm: fx.GraphModule) -> set[torch.dtype]:
    """The dtypes the last op of a graph computes in, whatever leaves the graph.

    Those of its results; those it reads where it makes no floats (`eq`).
    """
    found: set[torch.dtype] = set()
    for returned in gm.graph.output_node().all_input_nodes:
        op = returned
        while "autoamp_cast" in op.meta:
            op = op.all_input_nodes[0]
        read = [n.meta["val"] for n in op.all_input_nodes]
        found |= _floats(op.meta["val"]) or _floats(read)
    return found


def autocast_computes_in(row: Row) -> set[torch.dtype]:
    """The dtypes of what autocast makes of the row; fp32 of what has no floats.

    Comparisons promote natively, and a comparison of fp32 with half is one of fp32.
    """
    with autocast(row.device, row.low):
        made = row.function(*row.args, **row.kwargs)
    return _floats(made) or {torch.float32}


def _floats(values: Any) -> set[torch.dtype]:
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
    return {t.dtype for t in tensors if t.is_floating_point()}


def outcome(row: Row) -> dict[str, Any]:
    """What the row says, what autocast does and what our pass does, as text."""
    found: dict[str, Any] = {"row": row.name, "says": str(row.says)}
    for name, ask in (
        ("autocast", lambda: autocast_computes_in(row)),
        ("ours", lambda: computes_in(rewritten(row))),
    ):
        try:
            found[name] = sorted(map(str, ask()))
        except Exception as error:  # noqa: BLE001 -- told in the report of the row
            message = str(error).partition("\n")[0]
            found[name] = f"{type(error).__name__}: {message}"
    return found


def main(device: str, dtype: str) -> None:
    """Prints the outcome of every row of `device`."""
    fake = FakeTensorMode() if device == "cuda" else contextlib.nullcontext()
    with fake, torch.no_grad():
        for row in rows(device, getattr(torch, dtype)):
            print(json.dumps(outcome(row)), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
