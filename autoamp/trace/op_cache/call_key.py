"""The key of a call: calls with equal keys come to the same op."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.trace.op_cache.op_call import OperandNumber


class Description:
    """One tensor's description, computed when it is first asked for."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    @cached_property
    def whole(self) -> Hashable:
        """See `description`."""
        return description(self._value)

    @cached_property
    def kind(self) -> Hashable:
        """See `kind`."""
        return kind(self._value)


class Arguments:
    """The arguments of one call, while its key is made.

    Attributes:
        tensors: the tensors met so far, by their ids, in order.
    """

    def __init__(
        self,
        env: Mapping[fx.Node, Any],
        descriptions: Mapping[int, Description],
        any_shape: bool,
    ) -> None:
        """Takes the mappings in which the call's arguments are looked up.

        Args:
            env: the values of nodes.
            descriptions: descriptions of tensors, by the tensors' ids.
            any_shape: whether shapes and strides make no difference to the call.
        """
        self.tensors: dict[int, torch.Tensor] = {}
        self._env = env
        self._descriptions = descriptions
        self._any_shape = any_shape

    def frozen(self, value: Any) -> Hashable:
        """A value of the call's arguments as something that can be compared.

        Raises:
            TypeError: the value is of a kind that cannot be compared, or the value is
                a tensor that `descriptions` lacks.
        """
        if isinstance(value, fx.Node):
            value = self._env[value]
        if isinstance(value, torch.Tensor):
            return self._frozen_tensor(value)
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.frozen, value))
        if isinstance(value, dict):
            return type(value), tuple((k, self.frozen(v)) for k, v in value.items())
        if isinstance(value, slice):
            return slice, tuple(map(self.frozen, (value.start, value.stop, value.step)))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise TypeError
        # 0.0 and -0.0 compare equal, but they are different numbers.
        kept: Hashable = repr(value) if isinstance(value, float | complex) else value
        return type(value), kept

    def _frozen_tensor(self, value: torch.Tensor) -> Hashable:
        known = self._descriptions.get(id(value))
        if known is None:
            raise TypeError
        self.tensors.setdefault(id(value), value)
        operand = OperandNumber([*self.tensors].index(id(value)))
        return operand, known.kind if self._any_shape else known.whole


@compat.without_torch_function
def description(value: torch.Tensor) -> Hashable:
    """Every property of a tensor by which torch may choose the op of a call."""
    return kind(value), laid_out(value)


@compat.without_torch_function
def laid_out(value: torch.Tensor) -> Hashable:
    """How a tensor's elements lie in memory, and their dtype."""
    return value.shape, value.stride(), value.storage_offset(), value.dtype


@compat.without_torch_function
def kind(value: torch.Tensor) -> Hashable:
    """All that torch may choose the op of a call by, without shape and strides."""
    return (
        isinstance(value, torch.nn.Parameter),
        value.dim(),
        value.dtype,
        value.device,
        value.requires_grad,
    )
