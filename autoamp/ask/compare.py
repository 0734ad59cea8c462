"""`compare`: fp32 and mixed precision side by side, and the regions that cost accuracy.

A stand-in of the model is called twice on the same inputs with the same random numbers:
its graphs run once in fp32 and once as rewritten, node by node, with the real rounding.
Then each region (the low ops of one module) is put back into fp32 by itself, to see by
how much the error falls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoamp import compat
from autoamp.ask.comparison import Comparison, Errors, RegionError
from autoamp.ask.examine import checked_model, examined, on_the_models_device
from autoamp.ask.lockstep import Key, Score
from autoamp.ask.outcome import Heard, errors_of, node_errors, relative_error
from autoamp.ask.progress import told
from autoamp.ask.stand_in import Call, LossFn
from autoamp.ask.trials import Trials
from autoamp.errors import OptionError
from autoamp.model.eligible import required_precision
from autoamp.model.reporting import report_of
from autoamp.options import Options
from autoamp.printable import class_name
from autoamp.saved.rows import OpRow


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
    model = checked_model(model)
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise OptionError(f"tolerance={tolerance!r} is not a positive number")
    low, _ = required_precision(model, options)
    call: Call = on_the_models_device(model, (args, dict(kwargs)))
    with examined(model, options, low) as (twin, engine):
        bench = _Bench(twin, engine, call, loss_fn, trains=twin.training)
        fp32 = bench.trial(hears=True)
        bench.find_scale(lambda: bench.trial(fp32, hears=False))
        mixed = bench.trial(fp32, hears=True)
        errors = errors_of(mixed, fp32)
        # The report includes graphs of branches that only the mixed run took.
        rows = report_of(engine.record).ops
        lows = _low_ops(rows)
        nodes = node_errors(rows, fp32, mixed)
        del mixed
        fp32.values.clear()
        fp32.flows.clear()
        regions = bench.regions(lows, fp32, errors)
        autocast = bench.autocast(model, fp32)
        label = class_name(model)
        found = Comparison(label, low, errors, autocast, nodes, regions)
        if tolerance is None:
            return found
        order = [region.module for region in regions]
        keep = bench.smallest(order, fp32, tolerance)
    if not keep:
        return found.with_keep(keep, tolerance)
    return found.with_keep(keep, tolerance, bench.errors(keep, fp32))


class _Bench(Trials):
    """A stand-in whose calls run node by node, with every value noted."""

    def trial(
        self, exact: Heard | None = None, keep: Collection[str] = (), *, hears: bool
    ) -> Heard:
        """One call and its backward, in fp32 or as rewritten.

        Args:
            exact: the call in fp32; None if this call is the one in fp32.
            keep: modules that stay in fp32.
            hears: whether the values of nodes are kept.
        """
        found = Heard()
        scale = 1.0 if exact is None else self.scale

        def hear(
            key: Key, node: fx.Node, value: Tensor, rounded: Callable[..., Any]
        ) -> None:
            if not hears or key in found.values:
                return
            found.values[key] = value.detach().clone()
            if exact is not None and value.dtype == self.engine.record.low:
                found.added[key] = _added(node, key, rounded, exact)
            if value.requires_grad:
                compat.hook_gradient(
                    value, functools.partial(_keep, found.flows, key, scale)
                )

        own = self.engine.options
        options = own.replace(keep=(*own.keep, *keep)) if keep else own
        record = functools.partial(self.record, options=options)
        score = Score(exact is not None, hear, self.numbers, record)
        self.engine.play = score.play
        self.run(self.twin, found, scale)
        return found

    def errors(self, keep: Collection[str], fp32: Heard) -> Errors:
        """The errors with the modules `keep` in fp32."""
        return errors_of(self.trial(fp32, keep, hears=False), fp32)

    def autocast(self, model: nn.Module, fp32: Heard) -> Errors | None:
        """The errors under `torch.autocast`; None where it raises on this model."""
        found = self.under_autocast(model)
        return None if found is None else errors_of(found, fp32)

    def regions(
        self, lows: Mapping[str, int], fp32: Heard, errors: Errors
    ) -> list[RegionError]:
        """Each module put back into fp32 by itself; the largest gain comes first."""
        found = []
        for module, count in told(lows.items(), "putting modules back into fp32"):
            there = self.errors([module], fp32)
            gain = errors.worst - there.worst
            found.append(RegionError(module, count, there, gain))
        return sorted(found, key=lambda region: -region.gives_back)

    def smallest(
        self, order: Sequence[str], fp32: Heard, tolerance: float
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


def _added(node: fx.Node, key: Key, rounded: Callable[..., Any], exact: Heard) -> float:
    """The error of a low op's result on exact operands."""
    target = node.target
    draws = isinstance(target, compat.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags
    )
    if key not in exact.values or draws:
        return 0.0
    return relative_error([rounded(exact.values)], [exact.values[key]])


def _keep(
    flows: dict[Key, Tensor], key: Key, scale: float, grad: Tensor | None
) -> None:
    if grad is not None:
        flows[key] = grad.detach().float() / scale


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
