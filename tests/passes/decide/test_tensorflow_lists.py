"""TensorFlow's lists under its placement: its letter, and what differs from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional

from autoamp.passes.rules import Category, Rules
from autoamp.training.options import Options
from tests import small_models
from tests.passes.decide.door import tensorflow
from tests.small_models import Of, rewriting
from tests.strategies import Program, inputs, programs

SIDE = 16
PRECISIONS = ("fp16", "bf16")
X = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(1)) + 0.5
DOCS = Path(__file__).parents[3] / "docs" / "details.md"


def of(function: Callable[..., Any]) -> Of:
    """A model of one function over a table, a buffer and a layer."""
    torch.manual_seed(0)
    return Of(
        function,
        fc=nn.Linear(SIDE, SIDE),
        table=nn.Embedding(SIDE, SIDE),
        seen=torch.zeros(SIDE, SIDE),
        wide=torch.ones(SIDE, SIDE).double(),
    )


rewritten = rewriting(
    of,
    lambda: X.clone().requires_grad_(),
    "fp16",
    rules="tensorflow",
    placement="tensorflow",
)


# -- the lists -------------------------------------------------------------------------

MOVED = {"aten::mean": "deny", "aten::sum": "deny"}
"""What fp16 denies and bf16 infers."""

ONLY_BF16 = {
    "aten::rsqrt": "infer",
    "aten::square": "infer",
    "aten::scatter": "clear",
    "aten::upsample_bilinear2d": "clear",
}
ONLY_FP16_ALLOWS = (
    "_cudnn_rnn _thnn_fused_gru_cell _thnn_fused_lstm_cell cudnn_convolution_add_relu "
    "cudnn_convolution_relu gru gru_cell lstm lstm_cell rnn_relu rnn_relu_cell "
    "rnn_tanh rnn_tanh_cell"
)
ONLY_FP16 = {**dict.fromkeys(ONLY_FP16_ALLOWS.split(), "allow"), "one_hot": "clear"}


def lists(precision: str) -> dict[str, str]:
    low = torch.float16 if precision == "fp16" else torch.bfloat16
    rules = Options(precision=precision, rules="tensorflow").resolve_rules(low)
    return {op: str(rule.category) for op, rule in rules.table.items()}


def test_bf16_has_tensorflows_bf16_lists() -> None:
    """AutoMixedPrecisionListsMkl against ...Fp16, in TensorFlow 2.21's header."""
    fp16, bf16 = lists("fp16"), lists("bf16")
    common = fp16.keys() & bf16.keys()
    changed = {op: fp16[op] for op in common if fp16[op] != bf16[op]}
    assert changed == MOVED
    assert {bf16[op] for op in MOVED} == {"infer"}
    assert {op: bf16[op] for op in bf16.keys() - common} == ONLY_BF16
    assert {op: fp16[op] for op in fp16.keys() - common} == {
        f"aten::{op}": category for op, category in ONLY_FP16.items()
    }


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow-bf16"])
def test_kernels_that_are_missing_are_known(name: str) -> None:
    ours = Rules.default("fp16" if name == "tensorflow" else "bf16").table
    theirs = Rules.load(name).table
    known = {op: ours[op].no_kernel for op in theirs.keys() & ours.keys()}
    assert {op: theirs[op].no_kernel for op in known} == known
    assert any(known.values())


def test_the_name_means_the_lists_of_the_precision_in_use() -> None:
    def normalised(m: Of, x: Tensor) -> Tensor:
        h = m.fc(x)
        scale = (h * h).mean(-1, keepdim=True).rsqrt()
        return (h * scale) @ m.fc.weight

    low = {p: rewritten(normalised, precision=p).assignment.low for p in PRECISIONS}
    assert {"mul", "mean", "rsqrt", "mul_1"} <= low["bf16"]
    assert not {"mean", "rsqrt"} & low["fp16"]
    for name in ("tensorflow", "tensorflow-bf16"):
        found = rewritten(normalised, precision="bf16", rules=name)
        assert found.assignment.low == low["bf16"]


# -- the levels, by what the documentation says stands for them ------------------------


def levels(m: Of, x: Tensor) -> Tensor:
    """Infer and clear ops between two products, and a denied one behind them."""
    return ((m.fc(x).relu().tanh() @ m.fc.weight) + 1).exp()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_levels_have_equivalents(precision: str) -> None:
    name = "tensorflow" if precision == "fp16" else "tensorflow-bf16"
    rules = Rules.load(name)
    products = {"linear", "matmul"}
    listed = [op for c in Category for op in rules.names(c)]

    def low(**options: Any) -> set[str]:
        return set(rewritten(levels, precision=precision, **options).assignment.low)

    assert low() == {*products, "relu", "tanh", "add"}
    assert low(placement="forced") == products
    assert low(deny=rules.names("infer")) == {*products, "relu"}
    assert low(allow=listed) == {*products, "relu", "tanh", "add", "exp"}


# -- pins of ours that are off ---------------------------------------------------------


def picked(m: Of, x: Tensor) -> Tensor:
    values, _ = x.topk(SIDE)
    return values @ m.fc.weight


def compared(m: Of, x: Tensor) -> Tensor:
    h = m.fc(x)
    return torch.where(h > x, h, x) @ m.fc.weight


def dtype_asked(m: Of, x: Tensor) -> Tensor:
    """A softmax in fp32 is no danger to what follows it."""
    h = (m.fc(x) @ m.fc.weight).softmax(-1, dtype=torch.float32)
    return (h + m.fc(x)) @ m.fc.weight


OFF: dict[str, tuple[Callable[..., Any], str]] = {
    "a number that fp16 rounds to zero": (
        lambda m, x: (m.fc(x) * 1e-8) @ m.fc.weight,
        "mul",
    ),
    "a number beyond fp16's range": (
        lambda m, x: (m.fc(x) / 1e6) @ m.fc.weight,
        "div",
    ),
    "a number in a tensor": (
        lambda m, x: (m.fc(x) + torch.tensor(1e-8)) @ m.fc.weight,
        "add",
    ),
    "what picks reads what was made low": (picked, "topk"),
    "what compares reads what was made low": (compared, "gt"),
    "whole numbers are cast to fp32": (
        lambda m, x: (x > 1).to(torch.int64).to(torch.float32) @ m.fc.weight,
        "to_1",
    ),
    "the ceiling": (lambda m, x: (m.fc(x) * m.seen) @ m.fc.weight, "mul"),
    "what follows an op asked for in fp32": (dtype_asked, "add"),
}


@pytest.mark.parametrize("case", OFF)
def test_a_pin_of_ours_is_off(case: str) -> None:
    function, node = OFF[case]
    found = rewritten(function)
    assert node in found.assignment.low
    with torch.no_grad():
        near = torch.allclose(found.gm(X), of(function)(X), rtol=0.1, atol=0.1)
    assert near, "nothing was cut off"


# -- those that stay: docs/details.md lists them ----------------------------------


def pooled(m: Of, x: Tensor) -> Tensor:
    h = m.fc(x).view(1, SIDE, SIDE // 4, 2, 2)
    return functional.avg_pool3d(h, 2).flatten(2)[0] @ m.fc.weight[:2]


def remembered(m: Of, x: Tensor) -> Tensor:
    m.seen.mul_(m.fc(x).detach())
    return m.seen @ m.fc.weight


def statistics(m: Of, x: Tensor) -> Tensor:
    batch_norm = torch.ops.aten.native_batch_norm.default
    out, mean, _ = batch_norm(m.fc(x), None, None, None, None, True, 0.1, 1e-5)
    return (out @ m.fc.weight) + mean


def region(m: Of, x: Tensor) -> Tensor:
    h = m.fc(x)
    with torch.autocast("cpu", enabled=False):
        h = h.tanh()
    return h @ m.fc.weight


def shared(m: Of, x: Tensor) -> tuple[Tensor, ...]:
    h = m.fc(x)
    return h, h.view(-1), h @ m.fc.weight


LISTED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, str]] = {
    "no kernel": (pooled, (), "avg_pool3d", "torch has no fp16 kernel of it"),
    "outside": (remembered, (), "mul_", "a tensor that exists outside the graph"),
    "statistics": (statistics, (), "native_batch_norm", "its statistics are read"),
    "tables": (
        lambda m, x, i: m.table(i) @ m.fc(x),
        (X, torch.arange(SIDE)),
        "embedding",
        "adds up the gradients of each row",
    ),
    "fp32 asked": (
        lambda m, x: m.fc(x).softmax(-1, dtype=torch.float32) @ m.fc.weight,
        (),
        "softmax",
        "asks for an fp32 result",
    ),
    "no floats": (
        lambda m, x: torch.where(x > 1, 1.0, 0.0) @ m.fc.weight,
        (),
        "where",
        "makes fp32 from integers or booleans",
    ),
    "regions": (region, (), "tanh", "the model's own torch.autocast region"),
    "other floats": (
        lambda m, x: (m.fc(x) * m.wide).float() @ m.fc.weight,
        (),
        "mul",
        "operands of another float dtype",
    ),
    "shared results": (shared, (), "linear", "shares memory with another tensor"),
}
"""Row of the documentation: a program, a node that TensorFlow paints, our reason."""


def is_painted(found: Any, node: str) -> bool:
    """Whether TensorFlow's passes paint `node` once nothing pins it."""
    verdicts = dict(found.classified.verdicts)
    verdicts[node] = replace(verdicts[node], pinned=False)
    return node in tensorflow(replace(found.classified, verdicts=verdicts))


@pytest.mark.parametrize("row", LISTED)
def test_a_pin_that_is_listed_holds_what_tensorflow_paints(row: str) -> None:
    function, data, node, reason = LISTED[row]
    found = rewritten(function, *data)
    assert node not in found.assignment.low
    assert reason in found.assignment.decisions[node].reason
    assert is_painted(found, node)


def documented() -> set[str]:
    text = (
        DOCS.read_text("utf-8").split("## TensorFlow's painting")[1].split("\n## ")[0]
    )
    return set(re.findall(r"(?:^- |[.:] )\*(.+?)\*", text, re.MULTILINE))


def test_the_documentation_has_the_list() -> None:
    assert documented() == {*LISTED, "keep", "results", "one storage"}


@settings(max_examples=25)
@given(programs())
def test_nothing_else_is_pinned(program: Program) -> None:
    reasons = [reason for *_, reason in LISTED.values()]
    painting = {"rules": "tensorflow", "placement": "tensorflow"}
    for precision in PRECISIONS:
        found = small_models.rewritten(program, inputs(), precision, **painting)
        for verdict in found.classified.verdicts.values():
            if verdict.pinned and verdict.listed and verdict.category != "deny":
                assert any(reason in verdict.reason for reason in reasons)
        painted = tensorflow(found.classified)
        pins = found.assignment.pinned
        ties = {n for a, b, _ in found.assignment.problem.ties for n in (a, b)}
        assert painted - found.assignment.low <= pins.keys() | ties
