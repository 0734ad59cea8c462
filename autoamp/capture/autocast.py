"""Runs models under autocast in place of our graphs, and widens half arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp.dtypes import LOW_DTYPES, UNSCALED
from autoamp.place.devices import main_device


def autocast_for(
    model: nn.Module, args: tuple[Any, ...], low: torch.dtype, *, cached: bool = False
) -> torch.autocast:
    """A region of autocast for a call `model(*args)`; `fp32_results` follows it.

    Autocast is used where our graphs cannot run: under `vmap` and `torch.func`, inside
    a module the user compiles as one graph, or where Dynamo captures nothing; and where
    `tune` has measured that it is faster.

    Args:
        cached: whether all uses of a weight share a cast, as is autocast's default.
            Without, each use has its own cast, so a weight's gradient sums in fp32.
    """
    own = next(nn.Module.parameters(model), None)
    device = "meta" if own is None else own.device.type
    if device == "meta":  # its weights are arguments
        given = (v for v in pytree.tree_leaves(args) if isinstance(v, torch.Tensor))
        device = next((value.device.type for value in given), "cpu")
    return torch.autocast(device_type=device, dtype=low, cache_enabled=cached)


def fp32_results(result: Any, low: torch.dtype) -> Any:
    """The result of a call under autocast, widened as it is without autocast.

    A caller written for fp32 results may fail on half ones.
    """

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == low:
            return value.to(torch.float32)
        return value

    return pytree.tree_map(widen, result)


def graph_under_autocast(
    gm: fx.GraphModule, run: Callable[..., Any], low: torch.dtype
) -> Callable[..., Any]:
    """`run`, which runs graph `gm`, under autocast; fp32 results stay fp32.

    Args:
        low: the compute dtype where nothing is differentiated.
    """
    (output,) = gm.graph.find_nodes(op="output")
    wide = [_is_wide(value) for value in output.args[0]]

    def call(*args: Any) -> Any:
        with autocast_region(gm, low):
            results = run(*args)
        return tuple(
            r.to(torch.float32) if keep and r.dtype != torch.float32 else r
            for r, keep in zip(results, wide, strict=True)
        )

    return call


def autocast_region(gm: fx.GraphModule, low: torch.dtype) -> torch.autocast:
    """A region of autocast for graph `gm`, with `low` where it is not differentiated.

    Each use of a weight has its own cast, so that the weight's gradient sums in fp32.
    """
    device, dtype = main_device(gm).type, unscaled_dtype(low)
    return torch.autocast(device_type=device, dtype=dtype, cache_enabled=False)


def _is_wide(result: Any) -> bool:
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def unscaled_dtype(low: torch.dtype) -> torch.dtype:
    """The compute dtype for a region where nothing scales the loss."""
    return UNSCALED if torch.is_grad_enabled() else low


def all_widened(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with half tensors as fp32.

    A list or dict without half tensors stays the caller's own object, because a model
    may append to a list it is given.
    """

    def widen(argument: Any) -> Any:
        leaves = pytree.tree_leaves(argument)
        if all(_widened(leaf) is leaf for leaf in leaves):
            return argument
        return pytree.tree_map(_widened, argument)

    return tuple(map(widen, args)), {k: widen(v) for k, v in kwargs.items()}


def _widened(value: Any) -> Any:
    """`value`; as fp32 where it is a half tensor, which an ambient autocast made.

    The ambient autocast region is off inside the model.
    """
    if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES.values():
        return value.to(torch.float32)
    return value
