"""`python -m benchmarks.accumulators`: what products that keep their fp32 sums change.

No GPU is needed.  Numbers are emulated: a CPU multiplies widened operands in fp32,
which sums as a GPU's kernel does.  Kernels, bytes and peak memory are those of a
training step on tensors without memory, as `autoamp.plan(device="h100")` runs it.  The
time of a Function is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from autoamp.passes.decide import sums
from autoamp.passes.decide.devices import Device
from autoamp.passes.functions import low_weights, product
from autoamp.tools import plan_ways
from autoamp.tools.count_traffic import bytes_of
from autoamp.tools.plan_step import StepWatch

from . import report
from .errors import Step, relative_error, training_step
from .models import PAPER, gpu_cases
from .report import Data

MODELS = ("gpt2", "bert", "llama", "t5", "vit")
OFF = {"accumulators": False}
LOW = torch.bfloat16


@contextlib.contextmanager
def _everywhere() -> Iterator[None]:
    """Products keep their sums on this CPU too, whatever they save."""
    with (
        mock.patch.object(Device, "keeps_sums", True),
        mock.patch.object(sums, "PYTHON_NS", 0.0),
    ):
        yield


# -- numbers ---------------------------------------------------------------------------


def gradients(name: str) -> dict[str, Any]:
    """The error against float64 of the gradients of a model's matrices, both ways.

    The gradients are all rounded, or all kept, whatever that saves.
    """
    case = next(case for case in PAPER if case.name == name)

    def step(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        args, kwargs = case.inputs(0)
        wide = [a.to(dtype) if a.is_floating_point() else a for a in args]
        given = {
            k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in kwargs.items()
        }
        found: Step = training_step(model, case.loss, (tuple(wide), given))
        return [g for n, g in sorted(found.grads.items()) if g.dim() == 2]

    def converted(fuse: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        options: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
        return step(autoamp.convert(case.build(), fuse=fuse, **options))

    torch.manual_seed(0)
    truth = step(case.build().double(), torch.float64)
    with _everywhere():
        kept = relative_error(converted(True), truth)
    return {
        "model": name,
        "kept": kept,
        "rounded": relative_error(converted(OFF), truth),
    }


def one_layer() -> dict[str, float]:
    """The error of one layer's weight gradient, whose operands are rounded to bf16."""
    torch.manual_seed(0)
    data, grad = torch.randn(1024, 768), torch.randn(1024, 3072)
    truth = grad.double().t() @ data.double()
    kept = grad.to(LOW).float().t() @ data.to(LOW).float()
    errors = (relative_error(each, truth) for each in (kept, kept.to(LOW)))
    return dict(zip(("kept", "rounded"), errors, strict=True))


def tokens(count: int = 1024, width: int = 768, vocabulary: int = 50257) -> Data:
    """Greedy tokens of a head that differ from those of fp32, of `count`."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(count, width), torch.randn(vocabulary, width) * 0.02
    want = (hidden @ weight.t()).argmax(-1)
    exact_sums = hidden.to(LOW).float() @ weight.to(LOW).float().t()
    exact = exact_sums.argmax(-1)
    stored = exact_sums.to(LOW).argmax(-1)
    return {
        "of": count,
        "rounded": int((stored != want).sum()),
        "kept": int((exact != want).sum()),
        "by the store alone": int((stored != exact).sum()),
    }


# -- kernels ---------------------------------------------------------------------------


_NO_KERNEL = ("empty", "detach", "_unsafe_view")
"""Words in the names of ops that start no kernel, besides views."""


class _Kernels(StepWatch):
    """Counts the kernels of a step, the casts among them, and their bytes."""

    made: list[_Kernels] = []  # noqa: RUF012

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kernels = self.casts = self.moved = 0
        self.made.append(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = str(func)
        starts = not func.is_view and not any(each in name for each in _NO_KERNEL)
        if starts and func.namespace != "prim":
            self.kernels += 1
            self.casts += func is torch.ops.aten._to_copy.default
            self.moved += bytes_of((args, kwargs, result))
        return result


def kernels(name: str, *, quick: bool) -> dict[str, Any]:
    """What a step of a model at full size comes to on an H100, both ways."""
    case = next(case for case in gpu_cases(quick) if case.name == name)
    found: dict[str, Any] = {"model": name}
    for way, fuse in (("before", OFF), ("after", True)):
        torch._dynamo.reset()
        args, kwargs = case.inputs(0)
        options: dict[str, Any] = {"precision": "bf16", "fuse": fuse, "device": "h100"}
        _Kernels.made.clear()
        with mock.patch.object(plan_ways, "StepWatch", _Kernels):
            plan = autoamp.plan(case.build(), *args, kwargs=kwargs, **options)
        last = _Kernels.made[-1]
        found[way] = {
            "kernels": last.kernels,
            "casts": last.casts,
            "moved": last.moved,
            "peak": last.most,
            "seconds": plan.ways[-1].seconds,
        }
    return found


# -- the time of a Function ------------------------------------------------------------


def function_us(depth: int = 32, rounds: int = 15) -> float:
    """Microseconds that a `product` costs more than a layer whose use is in a group.

    The widening of the emulation is in the figure.
    """
    x = torch.randn(8, 8).to(LOW).requires_grad_()
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(depth)]
    copies = [weight.detach().to(LOW) for weight in weights]

    def ours() -> Tensor:
        y = x
        for weight, copy in zip(weights, copies, strict=True):
            y = product(y, weight, copy, turned=True)
        return y

    def grouped() -> Tensor:
        y = x
        for use in low_weights(*weights, *copies):
            y = functional.linear(y, use)
        return y

    def seconds(forward: Callable[[], Tensor]) -> float:
        begun = time.perf_counter()
        for _ in range(20):
            y = forward()
            torch.autograd.grad(y, (x, *weights), y.detach())
        return (time.perf_counter() - begun) / 20 / depth

    times = [seconds(ours) - seconds(grouped) for _ in range(rounds)]
    return sorted(times)[rounds // 2] * 1e6


# -- the table -------------------------------------------------------------------------


def measure(given: argparse.Namespace) -> Data:
    """All figures."""
    names = [name for name in MODELS if given.only in name]
    return {
        "note": "bf16; numbers emulated on a CPU, kernels of an H100 without one",
        "layer": one_layer(),
        "tokens": tokens(),
        "gradients": [gradients(n) for n in track(names, "gradients")],
        "kernels": [kernels(n, quick=given.quick) for n in track(names, "kernels")],
        "function_us": function_us(),
    }


def text(data: Data) -> str:
    """The page."""
    layer = {"model": "one layer", **data["layer"]}
    cells = [
        [
            row["model"],
            *(f"{row[way]:.3e}" for way in ("rounded", "kept")),
            f"{row['rounded'] / row['kept']:.2f}",
        ]
        for row in (layer, *data["gradients"])
    ]
    errors = report.markdown(("weight gradients", "rounded", "kept", "ratio"), cells)
    cells = [[row["model"], *_before_and_after(row)] for row in data["kernels"]]
    header = ("a step on H100", "kernels", "casts", "GB moved", "peak GB")
    found = data["tokens"]
    told = (
        f"Greedy tokens of a head of 50,257 rows that differ from fp32's, of "
        f"{found['of']}: {found['rounded']} where logits are rounded to bf16, "
        f"{found['kept']} where the sums are kept; the rounding alone changes "
        f"{found['by the store alone']}."
    )
    cost = (
        f"A Function of Python's costs {data['function_us']:.1f} us more than a layer."
    )
    return report.page(data, errors, told, report.markdown(header, cells), cost)


def _before_and_after(row: Data) -> Iterator[str]:
    units = {"kernels": (1, 0), "casts": (1, 0), "moved": (1e9, 2), "peak": (1e9, 2)}
    for key, (unit, digits) in units.items():
        was, now = (row[way][key] / unit for way in ("before", "after"))
        yield f"{was:.{digits}f} -> {now:.{digits}f}"


TABLE = report.Table("accumulators", measure, text, options=(report.ONLY, report.QUICK))

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
