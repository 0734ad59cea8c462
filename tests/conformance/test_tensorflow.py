"""TensorFlow's own tests: painted as there, with as many casts, never dearer.

The cases are in tensorflow_cpp.py and tensorflow_python.py.  Where torch, or a decision
of ours, makes another painting right, the case says why and has that painting; those
are counted apart.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from tests.conformance.painting import Case, painted, rewritten
from tests.conformance.table import Figures
from tests.conformance.tensorflow_cpp import CPP, UNARY, unary
from tests.conformance.tensorflow_python import PYTHON

CASES = [*CPP, *PYTHON]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_is_painted_as_there(case: Case, figures: Figures) -> None:
    theirs = rewritten(case, "tensorflow")
    assert painted(case, theirs) == case.expected
    assert len(theirs.casts) == case.casts
    figures.count("TensorFlow cases")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_optimal_placement_is_never_dearer(case: Case) -> None:
    """Of what may be low where TensorFlow paints, which no ceiling limits."""
    theirs = rewritten(case, "tensorflow").assignment
    assert theirs.optimal_cost <= theirs.cost


def test_every_case_has_a_name_of_its_own() -> None:
    names = Counter(case.name for case in CASES)
    assert [n for n, count in names.items() if count > 1] == []


def test_a_case_can_fail() -> None:
    """A name in the wrong case of letters, or one cast more, is seen."""
    case = next(c for c in CASES if c.name == "Simple")
    found = painted(case, rewritten(case, "tensorflow"))
    assert found != [name.lower() for name in case.expected]
    denied = {**case.__dict__, "options": {"deny": ["matmul"]}}
    assert painted(case, rewritten(Case(**denied), "tensorflow")) != case.expected


# -- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNARY)
def test_unary_ops_are_as_near_as_there(name: str, figures: Figures) -> None:
    """Between two products with the identity, on its range, to its tolerance."""
    call, lowest, highest, absolute, relative = UNARY[name]
    x = torch.linspace(lowest, highest, 256).reshape(16, 16).to(torch.float16).float()
    model, given = rewritten(unary(name), "tensorflow").gm, torch.eye(16)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        weights.popitem()[1].copy_(given)
        found = model(x)
    exact = getattr(torch, call, getattr(torch.nn.functional, call, None))
    assert exact is not None
    expected = exact(x.double(), -1) if "softmax" in call else exact(x.double())
    allowed = absolute + relative * expected.abs()
    worst = ((found - expected).abs() / allowed).max().item()
    figures.worst("error over TensorFlow's tolerance", worst)
    assert worst <= 1


class _Seen(TorchDispatchMode):
    """Float dtypes of the operands of each op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        floats = {a.dtype for a in args if isinstance(a, Tensor)}
        self.dtypes.setdefault(func._schema.name, set()).update(floats)
        return func(*args, **(kwargs or {}))


GRADIENTS = {
    "test_conv3d": "aten::convolution_backward",
    "test_conv_bn_dropout": "aten::convolution_backward",
    "test_depthwise_conv2d": "aten::convolution_backward",
    "test_multi_paths": "aten::convolution_backward",
    "test_multi_paths_2": "aten::mm",
    "test_simple_loop": "aten::mm",
    "test_loop_with_vars_intertwined": "aten::mm",
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_computed_low_too(name: str) -> None:
    """In bf16, whose kernels this CPU has; TensorFlow's tests run in both modes."""
    case = next(c for c in CASES if c.name == name)
    low = Case(**{**case.__dict__, "precision": "bf16"})
    gm = rewritten(low, "tensorflow", grad=True).gm
    for weight in gm.parameters():
        weight.requires_grad_()
    result = gm(*low.given())
    leaves = result if isinstance(result, tuple) else (result,)
    with _Seen() as seen:
        sum(leaf.sum() for leaf in leaves).backward()
    assert seen.dtypes[GRADIENTS[name]] == {torch.bfloat16}
    assert {w.grad.dtype for w in gm.parameters() if w.grad is not None} == {
        torch.float32
    }


def test_the_optimizer_in_the_graph_gets_every_digit() -> None:
    """test_ingraph_train_loop: a weight that is written stays fp32 and is read afresh.

    A product of fp16 rounds both operands and the result, each by half a unit of the
    last place (2**-11) of what it is made of.
    """
    case = next(c for c in CASES if c.name == "test_ingraph_train_loop")
    model = rewritten(case, "tensorflow").gm
    (x,) = case.given()
    weights = {n.rpartition(".")[2]: p for n, p in model.named_parameters()}
    weights |= {n.rpartition(".")[2]: b for n, b in model.named_buffers()}
    w, var = weights["w"].double(), weights["var"].double()
    allowed = torch.zeros(())

    def error(factor: Tensor) -> Tensor:
        """Of the product of `x` with what is off by `allowed` from `factor`."""
        return 3 * 2**-11 * x @ factor.abs() + x.sum(1, True) * allowed

    with torch.no_grad():
        found = model(x)
        x = x.double()
        for _ in range(2):
            allowed = allowed + 0.01 * error(w).sum()
            var = var - 0.01 * (x @ w).relu().sum()
            w = var
    assert weights["var"].dtype == torch.float32
    assert (weights["var"] - weights["var"].half()).abs().max() > 0
    assert ((weights["var"] - var).abs() <= allowed).all()
    assert ((found - x @ var).abs() <= error(var)).all()


class Squares(torch.nn.Module):
    """2**20, which fp16 does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 1))

    def forward(self) -> Tensor:
        return (self.weight * 2**10) @ (self.weight * 2**10)


def test_on_is_told_by_a_product_that_overflows() -> None:
    """test_grappler_pass_enabled: inf where the pass is on, and nowhere else."""
    model = Squares()
    autoamp.convert(model, precision="fp16", do_no_harm=False, strict=True)
    assert model().item() == math.inf
    with autoamp.disabled():
        assert model().item() == 2**20
    assert autoamp.revert(model)().item() == 2**20
