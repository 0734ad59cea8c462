"""Every torch.nn module: no crash, fp32 outside, errors within what rounding can do.

The samples of torch's `module_db` are calls with weights and buffers among the inputs,
so the laws are those of ops (`oplaws.py`); the first sample of each mode goes through
`convert(strict=True)` as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

import autoamp
from autoamp.errors import CaptureError
from tests.conformance import oplaws
from tests.conformance.opinfo import (
    Call,
    Case,
    Wrapped,
    captured_by_dynamo,
    case_called_with,
    run,
    runs,
    traced,
)
from tests.conformance.table import Figures

MOST = 4
"""Samples of a module in one mode, spread evenly over what torch has."""

pytestmark = pytest.mark.usefixtures("torch_quiet")

every_module = pytest.mark.parametrize("info", module_db, ids=lambda m: m.name)


def cases(info: ModuleInfo, most: int = MOST) -> Iterator[tuple[nn.Module, Case]]:
    """Samples in training, and in evaluation where torch says that it differs."""
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        sampled = list(
            info.module_inputs_func(
                info,
                device="cpu",
                dtype=torch.float32,
                requires_grad=True,
                training=training,
            )
        )
        for sample in sampled[:: -(-len(sampled) // most)]:
            yield case_of(info, sample, training)


def case_of(info: ModuleInfo, sample: Any, training: bool) -> tuple[nn.Module, Case]:
    """A module, and the call of it as a function of its weights and inputs."""
    made, given = sample.constructor_input, sample.forward_input
    args, kwargs = pytree.tree_map_only(Tensor, _fp32, (made.args, made.kwargs))
    torch.manual_seed(1)
    module = info.module_cls(*args, **kwargs).train(training)
    if info.is_lazy:
        module(*given.args, **given.kwargs)

    def call(weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, weights, args, kwargs)

    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    return module, case_called_with(call, (weights, *given.args), given.kwargs)


def _fp32(value: Tensor) -> Tensor:
    """Some samples are built with weights in float64."""
    return value.float() if value.dtype == torch.float64 else value


@every_module
def test_module(info: ModuleInfo, figures: Figures) -> None:
    """Denied, and before copies that run low, in both precisions."""
    for _, case in cases(info):
        model = Call(case)
        if not runs(model, case):
            continue  # plain torch refuses it
        try:
            oplaws.check_denied(model, case.inputs, case.finish)
        except CaptureError:
            assert traced(model, case.inputs()) is None
            continue
        figures.count("samples")
        copied = Wrapped(model, inputs=False)
        for precision in oplaws.LOW:
            asked = case.inputs, case.finish, precision
            checked = oplaws.check(copied, *asked, allow=["clone"])
            figures.worst("error over bound", checked.error or 0.0)


class Whole(nn.Module):
    """Calls a module with a sample's inputs and the weights of its own."""

    def __init__(self, module: nn.Module, case: Case) -> None:
        super().__init__()
        self.module, self.case = module, case

    def forward(self, *tensors: Tensor) -> Any:
        (_, *args), kwargs = self.case.with_tensors(tensors)
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("precision", oplaws.LOW)
@every_module
def test_module_converted(info: ModuleInfo, precision: str) -> None:
    for module, case in cases(info, 1):
        plain, again, model = (Whole(copy.deepcopy(module), case) for _ in range(3))
        if not runs(Call(case), case):
            continue
        expected = run(plain, case.inputs())
        captured = captured_by_dynamo(again, case)
        options = {"precision": precision, "do_no_harm": False, "strict": True}
        autoamp.convert(model, **options)
        if not captured:
            with pytest.raises(CaptureError):
                model(*case.inputs())
            continue
        ours = run(model, case.inputs())
        oplaws.same_kind(ours, expected)
        if not autoamp.report(model).casts:
            oplaws.same_bits(ours, expected)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules_are_low_only_where_torch_runs_them_in_half(
    kind: type[nn.RNNBase],
) -> None:
    """Plain torch in half says; torch 2.13 runs all three, so none is skipped above."""
    model, x = kind(4, 4), torch.randn(3, 2, 4)
    try:
        copy.deepcopy(model).half()(x.half())
        kernel = True
    except RuntimeError:
        kernel = False
    autoamp.convert(model, precision="fp16", do_no_harm=False, strict=True)
    model(x)
    assert {row.is_low for row in autoamp.report(model).ops} <= {False, kernel}


def test_every_module_of_torch_is_there() -> None:
    assert len(module_db) >= 114
