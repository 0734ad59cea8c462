"""The text of a graph before and after one pass, as the golden files have it.

One line for each node, with the dtype of its result:

    x: f32
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    relu: bf16 = relu(x_bf16)
    return relu

An op of torch is `aten.relu`; a Python function that calls ops is `relu`.  Attention's
name is cut to `sdpa`.  Under the graph stands what else the pass found out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import distribute_tensor

from autoamp import compat
from autoamp.compat import OpOverload
from autoamp.dtypes import parse_low_dtype
from autoamp.passes import list as passes
from autoamp.passes import run
from autoamp.passes.check.checks import Checks
from autoamp.passes.decide.devices import Device
from autoamp.passes.graph_record import Rewritten, Setting
from autoamp.passes.list import PASSES, Pass, Phase, copies_of
from autoamp.passes.ops import base_name
from autoamp.passes.see.normalise import normalise
from autoamp.passes.write.copied import copied
from autoamp.training.options import Options
from tests.one_rank import one_rank

__all__ = [
    "PASSES", "Device", "Example", "Options", "Pass", "Phase", "Rewritten", "Setting",
    "copied", "document", "passes", "run",
]  # fmt: skip

_SHORT = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Example:
    """A tiny program, and how it is run up to one pass.

    Attributes:
        program: a function of tensors.
        given: the inputs of the program, by their names.
        scaled: whether gradients are scaled at the edge of the graph.
        priced: whether casts of weights have a price, as for a graph that stands alone.
        device: the device of the prices; by default the graph's own.
        on_mesh: how inputs that are DTensors lie on a mesh of one rank.
        checkpointed: whether the program runs in a checkpoint.
        options: the options of a conversion that are not the usual ones.
    """

    program: Callable[..., Any]
    given: Mapping[str, Tensor]
    scaled: bool = False
    priced: bool = False
    device: Device | None = None
    on_mesh: Mapping[str, Any] = field(default_factory=dict)
    checkpointed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def document(shown: Pass, examples: list[Example]) -> str:
    """All that is to be said of a pass: what holds after it, and each example."""
    parts = [f"{shown.name}\n\n{shown.run.__doc__}"]
    if shown.without:
        parts[0] += f"\nWhere the pass fails: {shown.without}."
    for example in examples:
        source = inspect.getsource(example.program)
        told = [f"{k}={v!r}" for k, v in example.options.items()]
        told += ["loss_scale"] * example.scaled + [
            "casts have a price"
        ] * example.priced
        if example.device is not None:
            told.append(f"prices of a {example.device.name} device")
        told += [f"{name} on a mesh" for name in example.on_mesh]
        told += ["checkpointed"] * example.checkpointed
        title = " ".join(filter(None, (example.program.__name__, *told)))
        before, after, found = texts(shown, example)
        assert found or before != after, f"{shown.name} changes nothing in {title}"
        changed = ("-- before", "-- after") if before != after else ("-- the graph", "")
        graphs = [f"{changed[0]} --\n{before}"]
        graphs += [f"{changed[1]} --\n{after}"] * (before != after)
        graphs += [f"-- found --\n{found}"] * bool(found)
        heading = f"{'=' * 88}\n{title}\n\n{source[source.index('def ') :].rstrip()}"
        parts += [heading, *graphs]
    return "\n\n".join(parts) + "\n"


def texts(shown: Pass, example: Example) -> tuple[str, str, str]:
    """The graph of an example before a pass and after it, and what the pass found."""
    work, checks = _captured(example), Checks()
    for each in PASSES:
        if each.phase is Phase.PREPARE and work.rewritten is None:
            work = replace(work, rewritten=run._as_reported(work))
        now = run._run_one(each, work, checks)
        if each is shown:
            return text(work), text(now), "\n".join(_found(work, now))
        work = now
    raise AssertionError("the pass is not in the list")


def text(work: Rewritten) -> str:
    """The graph of `work`, or the code that is run in its place."""
    typed = {n.name: _typed(n) for n in work.gm.graph.nodes}
    copies = copies_of(work) if work.layouts else ()
    for copy, layout in zip(copies, work.layouts, strict=True):
        if layout != torch.preserve_format:
            typed[copy.name] += f" {_word(layout)}"
    found = "\n".join(_lines((work.code or work.gm).graph, typed))
    for name, body in work.gm.named_children():
        if isinstance(body, fx.GraphModule):
            found += f"\n{name}:\n" + "\n".join(
                f"    {line}"
                for line in _lines(
                    body.graph, {n.name: _typed(n) for n in body.graph.nodes}
                )
            )
    return found.replace("scaled_dot_product_attention", "sdpa")


def _found(before: Rewritten, after: Rewritten) -> Iterator[str]:
    """What a pass noted beside the graph, in words."""
    if before.facts is None and after.facts is not None:
        yield from _facts(after.facts)
    if after.classified is not before.classified:
        for name, verdict in after.classified.verdicts.items():
            pinned = ", stays fp32" * verdict.pinned
            yield f"{name}: {verdict.category.value}{pinned}: {verdict.reason}"
    if after.prices is not before.prices:
        for name, (high, low) in after.prices.ops.items():
            yield f"{name}: {high} in fp32, {low} low"
        for kind in ("down", "up"):
            for name, price in getattr(after.prices, kind).items():
                yield f"a cast {kind} of {name}: {price}"
        for each in after.prices.kept:
            sizes = f"{each.at_sink} bytes in fp32, {each.at_source} low"
            yield f"kept by {' and '.join(each.members)}: {sizes}"
    if after.assignment is not before.assignment:
        for name, decision in after.assignment.decisions.items():
            where = "low" if decision.low else "fp32"
            yield f"{name}: {where}: {decision.choice or decision.reason}"
        yield f"time: {after.assignment.cost}"
        yield f"kept: {after.assignment.kept} bytes"
    if after.casts != before.casts:
        yield "casts:"
        for c in after.casts:
            yield f"  {c.name}: {c.kind}, {c.bytes} bytes of {c.value}"
    if after.edge != before.edge:
        yield f"gradients leave through inputs {list(after.edge.exits)}"


def _facts(facts: Any) -> Iterator[str]:
    """Regions, memory and writes are counted from 0, which is not said."""
    numbers: dict[int, int] = {-1: 0}
    for fact in facts.nodes.values():
        memory = numbers.setdefault(fact.storage, len(numbers))
        known = [f"memory {memory}"] * (memory > 0)
        known += [f"region {fact.region}"] * (fact.region > 0)
        known += ["a gradient flows"] * fact.requires_grad
        known += [
            f"reads {each.value}" + f" after write {each.epoch}" * (each.epoch > 0)
            for each in fact.operands
        ]
        yield f"{fact.name}: {', '.join(known)}"
    yield f"weights: {', '.join(sorted(facts.weights))}"
    yield f"returned: {', '.join(sorted(facts.returned))}"
    if facts.mutated:
        yield f"written: memory {', '.join(str(numbers[s]) for s in facts.mutated)}"


def _captured(example: Example) -> Rewritten:
    """The ATen graph of a program, under the plan that a conversion would have."""
    asked = {"precision": "bf16", "do_no_harm": False, "strict": True}
    options = Options(**{**asked, **example.options})
    low = parse_low_dtype(options.precision)
    assert low is not None
    setting = Setting(
        free_weights=not example.priced,
        own_kernels=options.backend == "eager",
        scaled=example.scaled,
        device=example.device,
    )
    if example.on_mesh:
        gm = fx.symbolic_trace(example.program)
        with one_rank() as mesh:
            given = [_lies(example, name, mesh) for name in example.given]
            _Known(gm).run(*given)
            normalised = normalise(gm, given)
    else:
        gm = _calling(example, example.program)
        if example.checkpointed:
            gm = _calling(example, compat.CHECKPOINT, body=gm)
        normalised = normalise(gm, list(example.given.values()))
    return run._first_record(normalised, options, low, setting, {})


def _calling(example: Example, target: Any, **bodies: fx.GraphModule) -> fx.GraphModule:
    """A graph with the inputs of an example, which calls `target` on them."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in example.given]
    operands = *map(graph.get_attr, bodies), *inputs
    graph.output(graph.call_function(target, operands))
    return fx.GraphModule(dict(bodies), graph)


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
    if isinstance(value, (list, tuple)):
        kinds = [_SHORT[v.dtype] for v in value if torch.is_tensor(v)]
        return f"{node.name}: {', '.join(kinds)}" if kinds else node.name
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


# -- the list, as a table for readers --------------------------------------------------


def table_of_passes() -> str:
    """The passes in Markdown: what holds after each, and how it changes rounding."""
    lines = [
        "| pass | what holds after it | how it changes rounding |",
        "|---|---|---|",
    ]
    for each in PASSES:
        law = (each.run.__doc__ or "").rstrip(".")
        lines.append(f"| `{each.name}` | {law} | {each.rounding} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """A page with the table between its two marks."""
    head, _, rest = page.partition(BEGINS)
    _, ends, tail = rest.partition(ENDS)
    assert ends, "the page has no place for the table of passes"
    return f"{head}{BEGINS}\n{table_of_passes()}\n{ENDS}{tail}"


BEGINS = "<!-- passes: REWRITE_GOLDEN=1 pytest tests/passes/test_each_pass.py -->"
ENDS = "<!-- end of passes -->"
