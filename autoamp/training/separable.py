"""Proves that an optimizer steps each parameter by itself, whatever the others are.

Such an optimizer may step its parameters in several parts, one after the other, with
the same result to the bit.  Torch's own optimizers do, but for LBFGS.  Another class is
proved by its code: its step visits the parameters in a loop, carries no value from one
parameter to the next, and calls only such functions, or ops whose schemas, as torch
states them, take no list of tensors and draw no random numbers.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from autoamp import compat
from autoamp.passes.ops import overloads

_TORCH: list[Any] = [
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
    *(optim.Adafactor, optim.Muon, optim.SparseAdam),
]
"""Torch's classes whose `step` visits one parameter after the other, or by `foreach`
ops, which do the same to each (a test records the ops of each class)."""

_STEPS = [inspect.unwrap(each.step) for each in _TORCH]

_OF_MATRICES = [inspect.unwrap(each.step) for each in (optim.Adafactor, optim.Muon)]
"""Those that do not treat each element of a parameter by itself."""

_PLAIN = {
    *("closure", "len", "zip", "isinstance", "float", "int", "bool", "range"),
    *("filter", "hasattr", "getattr"),
}
"""Functions that a step may call: none makes one value of several parameters."""

_METHODS = {
    *("get", "items", "keys", "values", "float", "double", "no_grad", "enable_grad"),
    *("finfo", "is_complex", "is_floating_point", "size", "dim", "tensor"),
}
"""Names of methods and functions of torch that are no ops in its schemas."""


def body_of(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The step of a class without torch's hooks, if it steps each parameter by itself.

    None for any other class.
    """
    kind: Any = type(optimizer)
    if not hasattr(kind.step, "hooked"):
        return None
    # Torch marks the function that calls the hooks so, and wraps the step with it.
    body: Callable[..., Any] = kind.step.__wrapped__
    given = frozenset((n, v) for n, v in vars(optimizer).items() if _is_function(v))
    alone = _steps_each_alone(inspect.unwrap(body), kind, given)
    return body if alone else None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to step each element of a parameter by itself."""
    step: Any = inspect.unwrap(type(optimizer).step)
    return step in _STEPS and step not in _OF_MATRICES


def part_of(
    optimizer: Optimizer,
    instead: Mapping[int, torch.Tensor],
    state: Mapping[torch.Tensor, Any],
) -> Optimizer:
    """An optimizer of the same class and settings for some of the parameters.

    Args:
        instead: the tensor that takes a parameter's place, by the parameter's id.
        state: the state of each of these tensors that has one.
    """
    part: Any = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.param_groups = []
    for group in optimizer.param_groups:
        params = [instead[i] for i in map(id, group["params"]) if i in instead]
        if params:
            part.param_groups.append({**group, "params": params})
    part.state = defaultdict(dict, state)
    made: Optimizer = part
    return made


@functools.lru_cache(maxsize=256)
def _steps_each_alone(step: Any, kind: Any, given: frozenset[Any]) -> bool:
    """Args: `given` are functions that an instance has as attributes, by name."""
    if step in _STEPS:
        return True
    try:
        return _Reading(kind, dict(given)).visits_each_alone(step)
    except (OSError, TypeError, SyntaxError):  # there is no source to read
        return False


class _Reading:
    """Reads the code of one class's step, and of the functions that the step calls."""

    def __init__(self, kind: type[Optimizer], given: Mapping[str, Any]) -> None:
        self._kind, self._given = kind, given
        self._read: set[Any] = set()

    def visits_each_alone(self, function: Any) -> bool:
        """Whether `function` hands no value of one parameter to another."""
        function = inspect.unwrap(function)
        if function in self._read:
            return True
        self._read.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            return False
        if not _evaluates_first(tree):
            return False
        names = _names_of(function)
        # What decorates the function, as `torch.no_grad()` does, was unwrapped.
        body = [node for each in tree.body for node in ast.walk(each)]
        return all(self._allowed(node, names) for node in body)

    def _allowed(self, node: ast.AST, names: dict[str, Any]) -> bool:
        if isinstance(node, ast.Call):
            return self._may_call(node.func, names)
        if isinstance(node, ast.Subscript):
            if _attribute(node.value) == "state":  # of one parameter
                return isinstance(node.slice, ast.Name)
            # `group["betas"][0]`, but not `gradients[0]`.
            key = node.value if isinstance(node.value, ast.Subscript) else node
            return isinstance(key.slice, ast.Constant) and isinstance(
                key.slice.value, str
            )
        if isinstance(node, ast.For | ast.While):
            return not _carries(node)
        return not isinstance(node, ast.Global | ast.Nonlocal)

    def _may_call(self, called: ast.expr, names: dict[str, Any]) -> bool:
        if isinstance(called, ast.Name):
            value = names.get(called.id)
            if _is_function(value):
                return self.visits_each_alone(value)
            error = getattr(builtins, called.id, None)
            raised = isinstance(error, type) and issubclass(error, Exception)
            return raised or called.id in _PLAIN
        name, owner = _attribute(called), getattr(called, "value", None)
        if isinstance(owner, ast.Name) and owner.id == "self":
            method = self._given.get(name) or getattr(self._kind, name, None)
            return _is_function(method) and self.visits_each_alone(method)
        if isinstance(owner, ast.Name) and names.get(owner.id) is math:
            return True
        return name in _METHODS or _is_op_of_one(name)


def _evaluates_first(function: ast.FunctionDef) -> bool:
    """Whether `closure` is called once at most, and before any loop."""
    nodes = [*ast.walk(function)]
    loops = [n.lineno for n in nodes if isinstance(n, ast.For | ast.While)]
    calls = [n.func for n in nodes if isinstance(n, ast.Call)]
    named = [c for c in calls if isinstance(c, ast.Name) and c.id == "closure"]
    return not named or (len(named) == 1 and named[0].lineno < min(loops, default=0))


def _is_op_of_one(name: str) -> bool:
    """Whether a name is that of torch's ops that join no list and draw no numbers."""
    found = overloads(f"aten::{name}")
    alone = name.startswith("_foreach_") or not any(
        "Tensor[]" in str(argument.type) or "List[Tensor]" in str(argument.type)
        for each in found
        for argument in compat.schema(each).arguments
    )
    drawn = any(torch.Tag.nondeterministic_seeded in each.tags for each in found)
    return bool(found) and alone and not drawn


def _names_of(function: types.FunctionType) -> dict[str, Any]:
    """What the names in a function's code stand for, those of its own calls aside."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{name: c.cell_contents for name, c in cells}}


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType)


def _attribute(node: object) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def _carries(loop: ast.For | ast.While) -> bool:
    """Whether a value may pass from one round of a loop to the next.

    A name that is set in the loop is set before it is read, and no name from outside
    the loop is written to in place.
    """
    nodes = [node for each in loop.body for node in _in_order(each)]
    first: dict[str, object] = {}
    for node in nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            first.setdefault(node.target.id, node)
        if isinstance(node, ast.Name):
            first.setdefault(node.id, node.ctx)
    names = [n for n in nodes if isinstance(n, ast.Name)]
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    if any(not isinstance(first[name], ast.Store) for name in stored):
        return True
    target = loop.target if isinstance(loop, ast.For) else loop.test
    own = stored | {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    own |= {"", "torch"}  # a value that was just computed, `(a + b).sqrt_()`
    return any(
        _root(node) not in own and _attribute(getattr(node, "value", None)) != "state"
        for node in nodes
        if _writes(node)
    )


def _writes(node: ast.AST) -> bool:
    """Whether a node writes into an object that a name stands for."""
    if isinstance(node, ast.Call):  # `x.add_(y)`
        return _attribute(node.func).endswith("_")
    stored = isinstance(getattr(node, "ctx", None), ast.Store)
    return stored and isinstance(node, ast.Attribute | ast.Subscript)


_LAST = {ast.Assign: "targets", ast.AnnAssign: "target", ast.NamedExpr: "target"}
"""What is evaluated after the rest of a node; otherwise fields are in order."""


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all nodes in it, in the order in which they are evaluated.

    The names in a `lambda` are its own.
    """
    yield node
    if isinstance(node, ast.Lambda):
        return
    fields = [*ast.iter_fields(node)]
    if isinstance(node, ast.For):
        fields.sort(key=lambda field: field[0] != "iter")
    elif hasattr(node, "generators"):
        fields.sort(key=lambda field: field[0] != "generators")
    else:
        fields.sort(key=lambda field: field[0] == _LAST.get(type(node)))
    for _, value in fields:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _in_order(each)


def _root(node: ast.AST) -> str:
    """The name that a chain of calls and attributes begins with: `x` of `x.a.b()`."""
    while not isinstance(node, ast.Name):
        inner = getattr(node, "value", None) or getattr(node, "func", None)
        if not isinstance(inner, ast.AST):
            return ""
        node = inner
    return node.id
