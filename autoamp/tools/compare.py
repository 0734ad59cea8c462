"""`compare`: fp32 and mixed precision side by side, and the regions that cost accuracy.

A stand-in of the model is called twice on the same inputs with the same random numbers:
its graphs run once in fp32 and once as rewritten, node by node, with the real rounding.
Then each region (the low ops of one module) is put back into fp32 by itself, to see by
how much the error falls.  The rewrite keeps the names of nodes, so that the values of
both runs have the same keys.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import OptionError
from autoamp.files import write_whole
from autoamp.messages import (
    FULL_WIDTH,
    advice,
    class_name,
    counted,
    op_title,
    shorten,
    told,
)
from autoamp.passes.check.promised_dtypes import Held
from autoamp.passes.graph_record import Prepared, Rewritten
from autoamp.passes.node_by_node import Observer, Runner
from autoamp.passes.report_rows import OpRow
from autoamp.passes.write.dtensor_calls import crossed, stands_in
from autoamp.passes.write.emitted import stands_for
from autoamp.printed import Line, Printed, Table
from autoamp.reports.reporting import report_of
from autoamp.runtime.eligible import required_precision
from autoamp.runtime.examine import (
    before_rewrite,
    checked_model,
    examined,
)
from autoamp.runtime.stand_in import (
    Call,
    Heard,
    LossFn,
    StandIn,
    check_loss_fn,
    relative_error,
)
from autoamp.tools.named import given
from autoamp.training.options import OPTION_NAMES, Options

LISTED = 10


@dataclass(frozen=True)
class Errors:
    """Relative errors against fp32: ||mixed - fp32|| / ||fp32||.

    Attributes:
        output: the error of the output's float tensors together.
        gradients: the error of the gradients of all parameters together; None where
            there are none, as in eval mode.
    """

    output: float
    gradients: float | None

    @property
    def worst(self) -> float:
        """The larger of the two; NaN and infinity are larger than any number."""
        pair = [self.output] + ([] if self.gradients is None else [self.gradients])
        return max(pair, key=lambda e: math.inf if math.isnan(e) else e)


@dataclass(frozen=True)
class NodeError:
    """The error of one op.

    Attributes:
        graph, body, name: the op's node.
        op, precision, module, source: as in `OpRow`.
        error: the relative error of the result, including errors of its operands.
        added: the relative error that the op itself adds: the error of its result on
            exact operands, rounded to the dtype the op reads.  0 for an fp32 op, and
            for an op that draws random numbers.
        gradient: the relative error of the result's gradient; 0 if it has none.
    """

    graph: int
    body: str
    name: str
    op: str
    precision: str
    module: str
    source: str
    error: float
    added: float
    gradient: float


@dataclass(frozen=True)
class RegionError:
    """The low ops of one module, put back into fp32 by themselves.

    Attributes:
        module: the module's path; "" for ops of the model itself.
        ops: how many low ops the module has.
        errors: the errors of the model with these ops in fp32.
        gives_back: by how much the worst error falls; below 0 where it rises.
    """

    module: str
    ops: int
    errors: Errors
    gives_back: float


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """Mixed precision beside fp32 on one call and its backward.

    `print(comparison)` shows it.

    Attributes:
        label: the model's class name.
        precision: the compute dtype.
        errors: the errors of the model as converted.
        autocast: the errors under `torch.autocast` in the same dtype; None where
            autocast raises on the model.
        nodes: each float op; the op that adds most error comes first.
        regions: each module with low ops; the module whose return to fp32 removes most
            error comes first.
        tolerance: the error asked for, or None.
        keep: the modules to keep in fp32 for `tolerance`: a minimal set, from which no
            module can be left out.  None if no set reaches the tolerance.
        kept_errors: the errors of the model converted with `keep`; None if `keep` is
            empty or None.
        given: the options that the comparison was given.
    """

    columns = FULL_WIDTH

    label: str
    precision: torch.dtype
    errors: Errors
    autocast: Errors | None
    nodes: Sequence[NodeError]
    regions: Sequence[RegionError]
    tolerance: float | None = None
    keep: tuple[str, ...] | None = ()
    kept_errors: Errors | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The options to convert with: `convert(model, **comparison.options)`.

        They are those that the comparison was given, with the modules of `keep`.

        Raises:
            OptionError: no set of modules reaches the tolerance.
        """
        if self.keep is None:
            raise OptionError(
                f"no set of modules reaches an error of {self.tolerance:g}: give "
                "compare() a larger tolerance, or leave the model in fp32"
            )
        keep = [*self.given.get("keep", ()), *self.keep]
        return {**self.given} | ({"keep": keep} if keep else {})

    def with_keep(
        self,
        keep: tuple[str, ...] | None,
        tolerance: float,
        errors: Errors | None = None,
    ) -> Comparison:
        """A copy with the set found for a tolerance, and the errors that remain."""
        return replace(self, keep=keep, tolerance=tolerance, kept_errors=errors)

    def to_rules(self, path: str | Path) -> Path:
        """Writes `keep` as a rules file: `convert(model, rules=path)`.

        Raises:
            OptionError: no tolerance was given, no set of modules reaches it, or the
                file cannot be written; an older file is left unchanged.
        """
        if self.tolerance is None or self.keep is None:
            raise OptionError(
                "there are no modules to write: give compare() a tolerance that some "
                "set of modules reaches"
            )
        lines = [
            "[meta]",
            f'description = "{self.label}: an error of at most {self.tolerance:g}"',
            "",
            "[keep]",
            "modules = [",
            *(f"    {json.dumps(name)}," for name in self.keep),
            "]",
        ]
        write_whole(path, "\n".join(lines) + "\n")
        return Path(path)

    def __repr__(self) -> str:
        output, gradients = _pair(self.errors)
        return (
            f"<autoamp.Comparison of {self.label}: output error {output}, gradient "
            f"error {gradients} in {short_name(self.precision)}>"
        )

    def parts(self) -> Iterator[Line | Table]:
        """The errors of both, the ops and modules that cost most, and the answer."""
        low = short_name(self.precision)
        yield Line(f"autoamp compare: {self.label}, {low} against fp32", "head")
        yield Line("")
        raises = ("raises", "raises")
        other = raises if self.autocast is None else _pair(self.autocast)
        rows = [("autoamp", *_pair(self.errors)), ("torch.autocast", *other)]
        yield Table(["relative error of", "output", "gradients"], rows)
        if not self.regions:
            yield Line("")
            yield Line(f"No op runs in {low} with these options: nothing is rounded.")
        yield from self._ops()
        yield from self._modules()
        yield from self._answer()

    def _ops(self) -> Iterator[Line | Table]:
        adding = [node for node in self.nodes if node.added][:LISTED]
        if not adding:
            return
        yield Line("")
        yield Line("Ops that add most error", "title")
        rows = []
        for node in adding:
            errors = (node.added, node.error, node.gradient)
            # Without the folder and the code: "file.py:12".
            place = shorten(node.source).partition(": ")[0].rpartition("/")[2]
            name = op_title(node.op)
            rows.append([name, node.module, place, *(f"{e:.1e}" for e in errors)])
        header = ["op", "module", "source", "adds", "has", "gradient"]
        yield Table(header, rows, numbers=3)

    def _modules(self) -> Iterator[Line | Table]:
        if not self.regions:
            return
        yield Line("")
        yield Line("Modules that give most error back, kept in fp32", "title")
        rows = []
        for region in self.regions[:LISTED]:
            name = region.module or "(the model itself)"
            back = f"{region.gives_back:+.1e}"
            rows.append([name, str(region.ops), *_pair(region.errors), back])
        yield Table(["module", "low ops", "output", "gradients", "gives back"], rows)
        if len(self.regions) > LISTED:
            yield Line(f"and {counted(len(self.regions) - LISTED, 'more module')}")

    def _answer(self) -> Iterator[Line | Table]:
        if self.tolerance is None:
            return
        yield Line("")
        wanted = f"For an error of at most {self.tolerance:g}"
        if self.keep is None:
            yield Line(f"{wanted}: no set of modules kept in fp32 is enough.")
        elif not self.keep:
            yield Line(f"{wanted}: no module needs to be kept in fp32.")
        else:
            rule = advice("keep", [*self.keep], by_variables=False)
            yield Line(f"{wanted}: {rule}, as in convert(model, **comparison.options).")
            yield Line("to_rules(path) or --to-rules writes it as a rules file.")
            if self.kept_errors is not None:
                output, gradients = _pair(self.kept_errors)
                yield Line(f"Errors with that: {output} output, {gradients} gradients.")


def _pair(errors: Errors) -> tuple[str, str]:
    gradients = errors.gradients
    return f"{errors.output:.2e}", "none" if gradients is None else f"{gradients:.2e}"


# -- the question --------------------------------------------------------------------


def compare_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    *,
    loss_fn: LossFn | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """The errors of mixed precision on one call and its backward; see `compare`.

    Raises:
        UnsupportedModelError: the model cannot be captured, or would not be converted.
        OptionError: `tolerance` is no positive number, or the loss is no scalar.
    """
    made = given("compare", model, args, kwargs)
    model, args, kwargs = checked_model(made.model), made.args, made.kwargs
    check_loss_fn(loss_fn)
    is_number = isinstance(tolerance, int | float) and 0 < tolerance < math.inf
    if tolerance is not None and not is_number:
        raise OptionError(f"tolerance={tolerance!r} is not a positive number")
    low, _ = required_precision(model, options)
    call: Call = (args, dict(kwargs))
    with examined(model, options, low) as (twin, engine):
        bench = _Bench(twin, engine, call, loss_fn, trains=twin.training)
        fp32 = bench.trial(hears=True)
        bench.find_scale(lambda: bench.trial(fp32, hears=False))
        mixed = bench.trial(fp32, hears=True)
        errors = _errors_of(mixed, fp32)
        # The report includes graphs of branches that only the mixed run took.
        rows = report_of(engine.record).ops
        lows = _low_ops(rows)
        nodes = _node_errors(rows, fp32, mixed)
        del mixed
        fp32.values.clear()
        fp32.flows.clear()
        regions = bench.regions(lows, fp32, errors)
        autocast = bench.autocast(model, fp32)
        label, usual = class_name(model), Options()
        every = {name: getattr(options, name) for name in OPTION_NAMES}
        asked = {n: v for n, v in every.items() if v != getattr(usual, n)}
        comparison = Comparison(
            label, low, errors, autocast, nodes, regions, given=asked
        )
        if tolerance is None:
            return comparison
        order = [region.module for region in regions]
        keep = bench.smallest(order, fp32, tolerance)
    if not keep:
        return comparison.with_keep(keep, tolerance)
    return comparison.with_keep(keep, tolerance, bench.errors(keep, fp32))


class _Bench(StandIn):
    """A stand-in whose calls run node by node."""

    def trial(
        self,
        exact: HeardNodes | None = None,
        keep: Collection[str] = (),
        *,
        hears: bool,
    ) -> HeardNodes:
        """One call and its backward, in fp32 or as rewritten.

        Args:
            exact: the call in fp32; None if this call is the one in fp32.
            keep: modules that stay in fp32.
            hears: whether the values of nodes are kept.
        """
        heard = HeardNodes(exact=exact, scale=1.0 if exact is None else self.scale)
        own = self.engine.options
        options = own.replace(keep=(*own.keep, *keep)) if keep else own

        def play(prepared: Prepared, args: tuple[Any, ...]) -> Any:
            # A graph of a branch that no call took before gets the next number.
            number = self.numbers.setdefault(prepared, len(self.numbers))
            record = self.record(prepared, options)
            gm = before_rewrite(record) if exact is None else record.gm
            observers: list[Observer] = [Held()]
            if hears:
                observers.append(_Listener(heard, record, number))
            # Values are kept: the exact operands of an op are read from before casts.
            return Runner(gm, observers, keep_values=True).run(*args)

        self.engine.play = play
        self.run(self.twin, heard, heard.scale)
        return heard

    def errors(self, keep: Collection[str], fp32: HeardNodes) -> Errors:
        """The errors with the modules `keep` in fp32."""
        return _errors_of(self.trial(fp32, keep, hears=False), fp32)

    def autocast(self, model: nn.Module, fp32: HeardNodes) -> Errors | None:
        """The errors under `torch.autocast`; None where it raises on this model."""
        found = self.under_autocast(model)
        return None if found is None else _errors_of(found, fp32)

    def regions(
        self, lows: Mapping[str, int], fp32: HeardNodes, errors: Errors
    ) -> list[RegionError]:
        """Each module put back into fp32 by itself; the largest gain comes first."""
        regions = []
        for module, count in told(lows.items(), "putting modules back into fp32"):
            there = self.errors([module], fp32)
            gain = errors.worst - there.worst
            regions.append(RegionError(module, count, there, gain))
        return sorted(regions, key=lambda region: -region.gives_back)

    def smallest(
        self, order: Sequence[str], fp32: HeardNodes, tolerance: float
    ) -> tuple[str, ...] | None:
        """A minimal set of modules in fp32 whose error is within `tolerance`.

        Modules are added in `order` until the error is small enough; then each module
        that can be left out is left out.  None if all modules together do not suffice.
        """

        def suffices(modules: Collection[str]) -> bool:
            return self.errors(modules, fp32).worst <= tolerance

        if suffices(()):
            return ()
        if not suffices(order):
            return None
        least, most = 0, len(order)  # the first `most` modules suffice
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (
                (least, middle) if suffices(order[:middle]) else (middle, most)
            )
        chosen = list(order[:most])
        for module in told(order[:most], "leaving modules out again"):
            fewer = [each for each in chosen if each != module]
            if suffices(fewer):
                chosen = fewer
        return tuple(chosen)


def _low_ops(rows: Sequence[OpRow]) -> dict[str, int]:
    """Each module that calls a low op, to the number of low ops in and below it.

    `keep=` keeps a module with all modules below it, too.
    """
    low = [row.module for row in rows if row.is_low]
    return {
        module: sum(
            name == module or (bool(module) and name.startswith(f"{module}."))
            for name in low
        )
        for module in dict.fromkeys(low)
    }


def _errors_of(heard: Heard, fp32: Heard) -> Errors:
    """The errors of one call against the call in fp32."""
    names = sorted(fp32.gradients.keys() & heard.gradients.keys())
    pairs = [(heard.gradients[n], fp32.gradients[n]) for n in names]
    gradients = relative_error(*zip(*pairs, strict=True)) if pairs else None
    return Errors(relative_error(heard.output, fp32.output), gradients)


def _node_errors(
    rows: Sequence[OpRow], fp32: HeardNodes, mixed: HeardNodes
) -> list[NodeError]:
    """The errors of each op in its worst run; the op that adds most comes first."""
    keys: dict[tuple[int, str, str], list[Key]] = defaultdict(list)
    for key in mixed.values.keys() & fp32.values.keys():
        keys[key[:3]].append(key)

    def error(of: str, key: Key) -> float:
        return relative_error([getattr(mixed, of)[key]], [getattr(fp32, of)[key]])

    errors = []
    for row in rows:
        ran = keys.get((row.graph, row.body, row.name), [])
        if not ran:
            continue
        flows = [k for k in ran if k in mixed.flows and k in fp32.flows]
        errors.append(
            NodeError(
                graph=row.graph,
                body=row.body,
                name=row.name,
                op=row.op,
                precision=row.precision,
                module=row.module,
                source=row.source,
                error=max(error("values", k) for k in ran),
                added=max(mixed.added.get(k, 0.0) for k in ran),
                gradient=max((error("flows", k) for k in flows), default=0.0),
            )
        )
    return sorted(errors, key=lambda node: -node.added)


class Key(NamedTuple):
    """One node in one run of one graph.

    Attributes:
        graph: number of the captured graph.
        body: "" or the path of the body inside the graph.
        name: the node's name.
        run: how many times the graph, or the body, had run before.
    """

    graph: int
    body: str
    name: str
    run: int


@dataclass
class HeardNodes(Heard):
    """The numbers of one call, those of its nodes included.

    Attributes:
        exact: the call in fp32; None if this is that call.
        scale: the loss scale.
        values, flows: each node's result and its gradient.
        added: the error that each low node adds by itself.
        runs: how often each graph or body has run.
    """

    exact: HeardNodes | None = None
    scale: float = 1.0
    values: dict[Key, Tensor] = field(default_factory=dict)
    flows: dict[Key, Tensor] = field(default_factory=dict)
    added: dict[Key, float] = field(default_factory=dict)
    runs: Counter[tuple[int, str]] = field(default_factory=Counter)


class _Listener(Observer):
    """Keeps each float result, and its gradient, of one run of a graph or body."""

    def __init__(
        self, found: HeardNodes, record: Rewritten, graph: int, body: str = ""
    ) -> None:
        self.found, self.record, self.graph, self.body = found, record, graph, body
        self.number = found.runs[graph, body]
        found.runs[graph, body] += 1

    def of_body(self, run: fx.Interpreter, gm: fx.GraphModule) -> _Listener:
        """The listener to one run of a checkpointed region's body."""
        children = run.module.named_children()
        name = next(name for name, child in children if child is gm)
        body = getattr(self.record.before, name)
        record = next(each for each in self.record.bodies if each.gm is body)
        path = f"{self.body}/{name}" if self.body else name
        return _Listener(self.found, record, self.graph, path)

    def after(self, run: fx.Interpreter, n: fx.Node, value: Any) -> Any:
        """The value, which is kept if the node is a float op of the model."""
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        heard, key = self.found, self._key(n)
        # A backward runs a checkpointed region again, whose values are known already.
        if not is_float or key in heard.values:
            return value
        if n.name not in self.record.assignment.decisions:
            return value
        heard.values[key] = value.detach().clone()
        if heard.exact is not None and value.dtype == self.record.low:
            heard.added[key] = self._added(run, n, heard.exact.values)
        if value.requires_grad:
            keep = functools.partial(_keep, heard.flows, key, heard.scale)
            compat.hook_gradient(value, keep)
        return value

    def _key(self, n: fx.Node) -> Key:
        return Key(self.graph, self.body, n.name, self.number)

    def _added(
        self, run: fx.Interpreter, node: fx.Node, exact: Mapping[Key, Tensor]
    ) -> float:
        """The error of a low op's result on exact operands, rounded as it reads them.

        Args:
            exact: the values of the fp32 run.
        """
        target: Any = node.target
        draws = isinstance(target, compat.OpOverload) and (
            torch.Tag.nondeterministic_seeded in target.tags
        )
        if self._key(node) not in exact or draws:
            return 0.0

        def operand(at: fx.Node) -> Any:
            source = stands_for(at)
            value = exact.get(self._key(source), run.env[source])
            known = at.meta.get("val")
            if isinstance(value, Tensor) and isinstance(known, Tensor):
                return value.detach().to(known.dtype, copy=True)
            return value

        args, kwargs = map_arg(node.args, operand), map_arg(node.kwargs, operand)
        with torch.no_grad():
            if stands_in(node):
                inputs = node.graph.find_nodes(op="placeholder")
                rounded = crossed(node, args[0], [run.env[each] for each in inputs])
            else:
                rounded = target(*args, **kwargs)
        return relative_error([rounded], [exact[self._key(node)]])


def _keep(
    flows: dict[Key, Tensor], key: Key, scale: float, grad: Tensor | None
) -> None:
    if grad is not None:
        flows[key] = grad.detach().float() / scale
