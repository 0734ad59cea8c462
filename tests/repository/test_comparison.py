"""Errors are what they say, and a comparison with autocast is fair."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.metrics import (
    compare_with_autocast,
    output_and_grad_errors,
    relative_error,
    training_step,
)
from tests.models import BY_NAME, LARGE
from tests.quick import some_slow

BF16 = torch.bfloat16


def test_relative_error() -> None:
    a = {"x": torch.tensor([3.0, 0.0]), "n": torch.tensor(7)}
    b = {"x": torch.tensor([0.0, 4.0]), "n": torch.tensor(9)}
    assert relative_error(a, b) == pytest.approx(5 / 4)
    assert relative_error(a, a) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))
    z = torch.ones(1, dtype=torch.cfloat)
    assert relative_error(z * 1j, z) == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError, match="other shapes"):
        relative_error(torch.ones(2), torch.ones(3))


def test_a_missing_gradient_is_not_overlooked() -> None:
    case = BY_NAME["mlp"]
    model = case.model()
    whole = training_step(model, case.loss, case.inputs(0))
    model.get_parameter("0.weight").requires_grad_(requires_grad=False)
    part = training_step(model, case.loss, case.inputs(0))
    with pytest.raises(ValueError, match=r"one of the two only: \['0.weight'\]"):
        output_and_grad_errors([part], [whole])


@pytest.mark.parametrize("name", some_slow(sorted(BY_NAME), LARGE.__contains__))
def test_every_case_is_a_function_of_its_seeds(name: str) -> None:
    case = BY_NAME[name]
    model = case.model()
    twin = case.model()
    assert relative_error(dict(model.state_dict()), dict(twin.state_dict())) == 0.0
    first = training_step(model, case.loss, case.inputs(1), seed=5)
    again = training_step(twin, case.loss, case.inputs(1), seed=5)
    assert output_and_grad_errors([again], [first]) == (0.0, 0.0)
    assert math.isfinite(first.loss)
    other = training_step(copy.deepcopy(twin), case.loss, case.inputs(2), seed=5)
    assert other.loss != first.loss


def test_autocast_measures_as_itself_and_fp32_as_exact() -> None:
    case = BY_NAME["mlp"]
    record = compare_with_autocast(case, lambda model: model)
    assert record.converted.output_error == record.converted.grad_error == 0.0
    assert record.converted.counts.low_flops == 0
    assert record.converted.output_dtypes == (torch.float32,)
    assert record.autocast.output_dtypes == (BF16,)
    assert record.autocast.counts.low_share == 1.0
    assert 1e-4 < record.rounded.grad_error < record.autocast.grad_error < 1e-2
    # 3 weights, 3 biases, the input; the output's gradient; 6 gradients and no more.
    assert record.autocast.counts.cast_count(phase="forward") == 8
    assert record.autocast.counts.cast_count(source="weight") == 6
