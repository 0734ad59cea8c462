"""Small programs whose names say how they are to be painted, and how they are.

A program is lines of one op each.  A name in capitals must compute low, a name in small
letters in fp32:

    deny1 = exp(x)
    CLR1 = relu(deny1)
    ALLOW1 = matmul(CLR1, w)
    return ALLOW1

`x`, `y`, `z` are inputs, `m` is one of booleans; `w`, `v`, `u`, `b`, `c` are weights,
`mean` and `var` buffers.  A name that begins with `_` is of an op that meets no fp32.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autoamp.passes.graph_record import Rewritten
from tests import small_models

SIDE = 4
"""Rows and columns of inputs and weights, unless a case says otherwise."""

KEPT = "kept"
"""The module path of what is kept in fp32."""

FUNCTIONS = {
    **{name: value for name, value in vars(torch).items() if callable(value)},
    **{name: value for name, value in vars(functional).items() if callable(value)},
    "alias": torch.ops.aten.alias.default,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Case:
    """A program, the casts it must get, and why it differs from TensorFlow's, if so.

    Attributes:
        sizes: of inputs and weights that are not SIDE by SIDE.
        kept: names that the user keeps in fp32, as what TensorFlow may not process.
        otherwise: why torch or a decision of ours paints it differently; "" where it is
            painted as TensorFlow paints it.
    """

    name: str
    program: str
    casts: int
    precision: str = "fp16"
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    functions: Mapping[str, Any] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    otherwise: str = ""

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(name, expression) of each op."""
        lines = [line.strip() for line in self.program.strip().splitlines()]
        return [(n, e) for n, _, e in (x.partition(" = ") for x in lines[:-1])]

    @property
    def expected(self) -> list[str]:
        """The names as they are to be painted."""
        return [name for name, _ in self.lines if not name.startswith("_")]

    @property
    def returned(self) -> str:
        """The expression that is returned."""
        return self.program.strip().splitlines()[-1].strip().removeprefix("return ")

    def uses(self, name: str) -> bool:
        """Whether the program reads `name`."""
        return re.search(rf"\b{name}\b", self.program) is not None

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        return [n for n in ("x", "y", "z", "m") if self.uses(n)]

    def given(self) -> tuple[Tensor, ...]:
        """The inputs."""
        return tuple(map(self._tensor, self.inputs))

    def weights(self) -> dict[str, Tensor]:
        """The weights and buffers."""
        names = ("w", "v", "u", "b", "c", "mean", "var")
        return {n: self._tensor(n) for n in names if self.uses(n)}

    def _tensor(self, name: str) -> Tensor:
        made = torch.rand(self.sizes.get(name, (SIDE, SIDE)))
        return made > 0.5 if name == "m" else made


def cases(text: str, **more: Mapping[str, Any]) -> list[Case]:
    """The cases written in `text`, each with a blank line before the next.

    A case begins with `name: casts`, and its program follows in indented lines.

    Args:
        more: the other arguments of `Case` of those that have any, by name.
    """
    found = []
    for block in text.strip().split("\n\n"):
        head, program = block.split("\n", 1)
        name, _, casts = head.rpartition(": ")
        found.append(Case(name, program, int(casts), **more.pop(name, {})))
    assert not more, f"no such case: {[*more]}"
    return found


class Program(nn.Module):
    """Runs the lines of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for name, weight in case.weights().items():
            if name in ("mean", "var"):
                self.register_buffer(name, weight)
            else:
                self.register_parameter(name, nn.Parameter(weight))

    def forward(self, *given: Tensor) -> Any:
        names = dict(self.named_parameters()) | dict(self.named_buffers())
        names |= dict(zip(self.case.inputs, given, strict=True))
        known = FUNCTIONS | dict(self.case.functions)
        for name, expression in self.case.lines:
            with inside(KEPT if name in self.case.kept else ""):
                names[name] = eval(expression, known, names)
        return eval(self.case.returned, known, names)


@contextlib.contextmanager
def inside(module: str) -> Iterator[None]:
    """What is traced here looks as if called in a sub-module of that name."""
    if not module:
        yield
        return
    node = fx.Graph().placeholder("there")
    node.meta["nn_module_stack"] = {module: (module, nn.Module)}
    with fx.traceback.set_current_meta(node):
        yield


def rewritten(case: Case, placement: str, grad: bool = False) -> Rewritten:
    """The program of `case` under TensorFlow's lists."""
    torch.manual_seed(0)
    given = case.given()
    asked = {"rules": "tensorflow", "placement": placement, "keep": (KEPT,)}
    with torch.set_grad_enabled(grad):
        return small_models.rewritten(
            Program(case), given, case.precision, **asked, **case.options
        )


def painted(case: Case, result: Rewritten) -> list[str]:
    """The names of the program as `result` paints them."""
    decisions = [*result.assignment.decisions.values()]
    ops = [d.op for d in decisions]
    assert len(ops) == len(case.expected), f"{case.name}: a line is one op: {ops}"
    return [
        name.upper() if decision.low else name.lower()
        for name, decision in zip(case.expected, decisions, strict=True)
    ]
