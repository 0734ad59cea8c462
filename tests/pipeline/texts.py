"""The text of a graph before and after one pass, as the examples print it.

One line for each node, with the dtype of its result:

    x: f32
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    relu: bf16 = relu(x_bf16)
    return relu

An op of torch is `aten.relu`; a Python function that calls ops is `relu`.  Attention's
name is cut to `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import distribute_tensor

from autoamp.compat import OpOverload
from autoamp.dtypes import parse_low_dtype
from autoamp.op_names import base_name
from autoamp.options import Options
from autoamp.pipeline.checks import Checks
from autoamp.pipeline.passes import PASSES, Phase, copies_of, takes_our_ops
from autoamp.pipeline.run import _begun, _passed, _settled
from autoamp.rewrite.rewritten import Rewritten, Setting
from autoamp.trace.normalise import normalise
from tests.one_rank import one_rank

_SHORT = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Example:
    """A tiny program, and the text of its graph before and after one pass.

    Attributes:
        of: the name of the pass.
        program: a function of tensors.
        given: the inputs of the program, by their names.
        before, after: the texts.
        precision: the compute dtype.
        scaled: whether gradients are scaled at the edge of the graph.
        backend: what runs the graph.
        on_mesh: how inputs that are DTensors lie on a mesh of one rank.
    """

    of: str
    program: Callable[..., Any]
    given: Mapping[str, Tensor]
    before: str
    after: str
    precision: str = "bf16"
    scaled: bool = False
    backend: str = "eager"
    on_mesh: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> tuple[str, str]:
        """The texts without their indentation."""
        return cleandoc(self.before), cleandoc(self.after)


def texts(example: Example) -> tuple[str, str]:
    """The graph of an example before its pass, and after it."""
    work, checks = _captured(example), Checks()
    for each in PASSES:
        if each.phase is Phase.PREPARE and work.rewritten is None:
            work = replace(work, rewritten=_settled(work))
        now = _passed(each, work, checks)
        if each.name == example.of:
            return text(work), text(now)
        work = now
    raise AssertionError(f"no pass is called {example.of!r}")


def text(work: Rewritten) -> str:
    """The graph of `work`, or the code that is run in its place."""
    typed = {n.name: _typed(n) for n in work.gm.graph.nodes}
    copies = copies_of(work) if work.layouts else ()
    for copy, layout in zip(copies, work.layouts, strict=True):
        if layout != torch.preserve_format:
            typed[copy.name] += f" {_word(layout)}"
    found = "\n".join(_lines((work.code or work.gm).graph, typed))
    return found.replace("scaled_dot_product_attention", "sdpa")


def _captured(example: Example) -> Rewritten:
    """The ATen graph of a program, under the plan that a conversion would have."""
    low = parse_low_dtype(example.precision)
    assert low is not None
    options = Options(
        precision=example.precision,
        backend=example.backend,
        do_no_harm=False,
        strict=True,
    )
    setting = Setting(
        free_weights=True,
        own_kernels=example.backend == "eager",
        own_ops=takes_our_ops(options),
        scaled=example.scaled,
    )
    gm = fx.symbolic_trace(example.program)
    if example.on_mesh:
        with one_rank() as mesh:
            given = [_lies(example, name, mesh) for name in example.given]
            _Known(gm).run(*given)
            normalised = normalise(gm, given)
    else:
        normalised = normalise(gm, list(example.given.values()))
    return _begun(normalised, options, low, setting, {})


def _lies(example: Example, name: str, mesh: Any) -> Tensor:
    """An input of an example, on the mesh if the example says so."""
    value = example.given[name]
    if name not in example.on_mesh:
        return value
    part = distribute_tensor(value.detach(), mesh, [example.on_mesh[name]])
    is_weight = isinstance(value, nn.Parameter)
    return nn.Parameter(part) if is_weight else part


class _Known(fx.Interpreter):
    """Leaves on each node its value, as Dynamo does."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def _lines(graph: fx.Graph, typed: Mapping[str, str]) -> Iterator[str]:
    for node in graph.nodes:
        given = [*map(_word, node.args)]
        given += [f"{name}={_word(value)}" for name, value in node.kwargs.items()]
        if node.op == "output":
            yield f"return {', '.join(given)}"
        elif node.op == "placeholder":
            yield typed[node.name]
        elif node.op == "call_function":
            result = typed.get(node.name) or _typed(node)
            yield f"{result} = {_called(node.target)}({', '.join(given)})"


def _typed(node: fx.Node) -> str:
    value = node.meta.get("val")
    return (
        f"{node.name}: {_SHORT[value.dtype]}" if torch.is_tensor(value) else node.name
    )


def _called(target: Any) -> str:
    if isinstance(target, OpOverload):
        return base_name(target).replace("::", ".")
    return str(target.__name__)


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_word, value))}]"
    if isinstance(value, torch.dtype):
        return _SHORT[value]
    return str(value).removeprefix("torch.")
