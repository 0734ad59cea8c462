"""What a rewritten graph asks of its inputs before it computes with them.

A graph is written for the kind of inputs it was rewritten with; each check here refuses
an input of another kind, for which the graph would compute something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoamp.errors import CaptureError

Path = tuple[str, Any]
"""How a part of a container is reached: "item" and a key, or "attribute" and a name."""

LEAF = "_"
"""The structure of a value that is no container."""

_ADVICE = "call autoamp.rewrite again with example inputs of this kind"


def parts(value: Any) -> list[tuple[Path, Any]] | None:
    """The parts of a container, each with its path; None for any other value."""
    if isinstance(value, dict):
        return [(("item", key), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(("item", at), part) for at, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(("attribute", name), getattr(value, name)) for name in names]
    return None


def structure(value: Any) -> str:
    """The containers of a value and their keys, as text, without what they hold."""
    found = parts(value)
    if found is None:
        return LEAF
    each = [f"{path[1]!r}: {structure(part)}" for path, part in found]
    if isinstance(value, dict):
        each.sort()  # the order of keys makes no difference
    inside = ", ".join(each)
    return f"{type(value).__name__}({inside})"


@fx.has_side_effect
def check_tensor(
    value: Any, name: str, dtype: torch.dtype, sizes: Sequence[int | None]
) -> None:
    """Refuses an input that is no tensor of this dtype and of these sizes.

    Args:
        sizes: each size; None where the graph takes any.
    """
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"input {name} is of type {type(value).__name__}, and the graph was "
            f"rewritten with a tensor; {_ADVICE}"
        )
    fits = value.dtype == dtype and len(value.shape) == len(sizes)
    if fits:
        for size, wanted in zip(value.shape, sizes, strict=True):
            if wanted is not None and size != wanted:
                fits = False
    if not fits:
        wanted_sizes = ", ".join("any" if s is None else str(s) for s in sizes)
        raise CaptureError(
            f"input {name} is a tensor of {value.dtype} with the sizes "
            f"{tuple(value.shape)}, and the rewritten graph takes {dtype} with the "
            f"sizes ({wanted_sizes}); {_ADVICE}"
        )


@fx.has_side_effect
def check_value(value: Any, name: str, wanted: Any) -> None:
    """Refuses an input that is not the value that the graph was rewritten with."""
    if type(value) is not type(wanted) or value != wanted:
        raise CaptureError(
            f"input {name} is {value!r}, and the graph was rewritten with "
            f"{wanted!r}, which decides what the graph computes; {_ADVICE}"
        )


@fx.has_side_effect
def check_number(value: Any, name: str, wanted: str) -> None:
    """Refuses an input that is no number of the type (`int`, `float`) wanted."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS[wanted]):
        raise CaptureError(
            f"input {name} is of type {type(value).__name__}, and the graph was "
            f"rewritten with a number of type {wanted}; {_ADVICE}"
        )


_NUMBERS = {
    "int": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
}


def torchs_tuple(name: str, values: Sequence[Any]) -> Any:
    """A tuple of a type of torch's: `torch.Size`, or one of `torch.return_types`."""
    kind = torch.Size if name == "Size" else getattr(torch.return_types, name)
    return kind(values)


def sized(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A factory whose sizes depend on the inputs.

    A trace of the graph's code sees no symbolic sizes in a list that torch parses.
    """
    return op(*args, **kwargs)


@fx.has_side_effect
def check_structure(value: Any, name: str, wanted: str) -> None:
    """Refuses a container of another structure than the graph was rewritten with."""
    if structure(value) != wanted:
        raise CaptureError(
            f"input {name} is {structure(value)}, and the graph was rewritten with "
            f"{wanted}; {_ADVICE}"
        )


@fx.has_side_effect
def check_condition(holds: Any, wanted: bool, condition: str) -> None:
    """Refuses inputs for which a condition does not hold that the trace relied on.

    Args:
        wanted: the value of `holds` where the condition holds.
    """
    # Torch 2.13 has no expression for a comparison of a symbolic comparison with True.
    if bool(holds) != wanted:
        raise CaptureError(
            f"these inputs are not as the graph was rewritten: it relies on "
            f"{condition}; {_ADVICE}"
        )


INPUT_CHECKS: frozenset[Callable[..., Any]] = frozenset(
    {check_condition, check_number, check_structure, check_tensor, check_value}
)
