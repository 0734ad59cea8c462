"""Finds the layouts that a graph's values really have, after layouts were changed.

A graph records the strides that the graph before had.  Here the values that
follow a changed layout are computed again on fake tensors, node by node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.check.compare import is_view
from autoamp.passes.check.standin import named, where
from autoamp.passes.functions import laid_out
from autoamp.passes.see.nodes import tensors_of
from autoamp.passes.see.strides import called, made_of


def check_strides(
    gm: fx.GraphModule, last: Collection[str], formats: dict[int, torch.memory_format]
) -> None:
    """Raises where a changed layout reaches a result, or a call that cannot take it.

    Args:
        last: names of inputs that come with their channels last.
        formats: that memory format, by the number of dimensions.

    Raises:
        VerificationError: a result has other strides, or a call fails on its operands.
    """
    laid: dict[fx.Node, Any] = {}
    mode = compat.new_fake_mode(symbolic=False)

    def value(node: fx.Node) -> Any:
        return laid[node] if node in laid else _fake(node.meta.get("val"), mode)

    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in last:
            plain = value(node)
            laid[node] = plain.contiguous(memory_format=formats[plain.dim()])
            continue
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(gm)
            # The pass makes constants anew, and leaves the strides recorded of them.
            if _strides(held) != _strides(node.meta.get("val")):
                laid[node] = _fake(held, mode)
            continue
        # A value that follows no changed layout lies as it is recorded.
        if node.target is not laid_out and laid.keys().isdisjoint(node.all_input_nodes):
            continue
        if node.op == "output":
            for result in node.all_input_nodes:
                if result in laid:
                    raise VerificationError(
                        f"{where(result)} is returned with strides "
                        f"{_strides(laid[result])}, where the model's has "
                        f"{_strides(result.meta['val'])}",
                        nodes=named(result),
                    )
            continue
        try:
            made = made_of(node, value, mode)
            if is_view(node.target):
                _shows_as_before(node, value)
        except VerificationError:
            raise
        except Exception as error:
            raise VerificationError(
                f"{where(node)} fails on operands with the channels last: "
                f"{type(error).__name__}: {error}",
                nodes=named(node),
            ) from error
        if _strides(made) != _strides(node.meta.get("val")):
            laid[node] = made


def _shows_as_before(node: fx.Node, value: Callable[[fx.Node], Any]) -> None:
    """Raises where a call that was a view makes a copy now, or the other way round.

    `reshape` does so, and a later write to the operand would be seen or missed.
    """
    shows: list[set[fx.Node]] = []
    for operands in (
        {n: _on_meta(n.meta.get("val")) for n in node.all_input_nodes},
        {n: _on_meta(value(n)) for n in node.all_input_nodes},
    ):
        result = tensors_of(called(node, operands.__getitem__))
        memory = {compat.storage_id(t) for t in result}
        shows.append(
            {
                n
                for n, read in operands.items()
                if not memory.isdisjoint(map(compat.storage_id, tensors_of(read)))
            }
        )
    if shows[0] != shows[1]:
        raise VerificationError(
            f"{where(node)} shows memory of other operands with the channels last",
            nodes=named(node),
        )


def _on_meta(value: Any) -> Any:
    return compat.like(value, device="meta")


def _fake(value: Any, mode: compat.FakeTensorMode) -> Any:
    """A fake tensor like a recorded value, with numbers for symbolic sizes."""
    with mode:
        return compat.like(value)


def _strides(value: Any) -> list[Any]:
    """The strides that tell elements apart, of each tensor of a value."""
    return [
        [
            compat.hint(stride)
            for size, stride in zip(t.shape, t.stride(), strict=True)
            if compat.hint(size) != 1
        ]
        for t in tensors_of(value)
        if all(compat.hint(size) for size in t.shape)
    ]
