"""The casts a report speaks of are the casts that run, forward and backward."""

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import autoamp
from tests.models import BY_NAME, LARGE
from tests.quick import each_with_one
from tests.report.inside import (
    Counts,
    cast_counts,
    conversion_of,
    copies_of,
    count_ops,
)
from tests.says import says
from tests.small_models import BF16

PRECISIONS = ["bf16", "fp16"]

INSIDE_TORCH = {("lstm", "bf16"): 1 - 8}
"""Casts of the backward that torch's own kernel adds or spares: the CPU's bf16 LSTM
gives fp32 gradients, which its input wants rounded and its eight weights want so."""

BF16_KERNELS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether oneDNN's bf16 kernels run on this CPU; torch has others that run anywhere."""


@pytest.fixture(autouse=True)
def _attention_without_casts():
    """With dropout, attention on CPUs widens low inputs, unless it is told not to."""
    was = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(was)


def runs_of(model) -> list[int]:
    graphs = conversion_of(model).engine.record.graphs
    return [graph.runs for graph in graphs if graph.rewritten is not None]


def ran(model, step) -> tuple[Counts, tuple[int, int, int]]:
    """What one step ran, and the casts that the report says of the graphs that ran."""
    before = runs_of(model)
    counts = count_ops(step, model.parameters())
    times = [b - a for a, b in zip(before, runs_of(model), strict=True)]
    said = [0, 0, 0]
    for section in autoamp.report(model).sections:
        each = cast_counts([section])
        for i, number in enumerate((each.forward, each.backward, each.kept)):
            said[i] += number * times[section.graph]
    return counts, tuple(said)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *each_with_one(sorted(BY_NAME.keys() - LARGE), PRECISIONS),
        *(
            pytest.param(name, precision, marks=pytest.mark.slow)
            for name in sorted(LARGE)
            for precision in PRECISIONS
        ),
    ],
)
def test_a_training_step(name, precision) -> None:
    case = BY_NAME[name]
    scale = 1.0 if precision == "fp16" else "auto"
    options = {"precision": precision, "do_no_harm": False, "loss_scale": scale}
    model = autoamp.convert(case.model(), **options)
    args, kwargs = case.inputs(0)

    def step() -> None:
        case.loss(model(*args, **kwargs)).backward()

    for _ in range(2):
        step()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0)  # every weight's copy is stale
    counts, (forward, backward, kept) = ran(model, step)
    assert counts.refreshed == kept
    said = " ".join(str(autoamp.report(model)).split())
    uncounted = "inside of 1 recurrent call are not counted" in said
    is_one_kernel = BF16_KERNELS and precision == "bf16"
    assert uncounted == (name == "lstm" and not is_one_kernel)
    if uncounted:  # the kernel that the LSTM runs by casts at each of its steps
        assert counts.cast_count(phase="forward") > forward
        assert counts.cast_count(phase="backward") > backward
        return
    assert counts.cast_count(phase="forward") == forward
    inside = INSIDE_TORCH.get((name, precision), 0)
    assert counts.cast_count(phase="backward") == backward + inside


class Regions(nn.Module):
    """A checkpointed region that ends in fp32, and one whose result is read low."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def _softmax(self, x):
        return self.first(self.first(x).exp().log1p())

    def forward(self, x):
        for part in (self._softmax, self.second):
            x = checkpoint.checkpoint(part, x, use_reentrant=False)
        return self.head(x).softmax(-1)


def test_checkpointed_regions_run_casts_again() -> None:
    model = autoamp.convert(Regions(), **BF16)
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        model(x).square().sum().backward()

    step()
    counts, (forward, backward, _) = ran(model, step)
    assert counts.cast_count(phase="forward") == forward
    assert counts.cast_count(phase="backward") == backward
    without = cast_counts([autoamp.report(model).sections[0]]).backward
    assert backward > without


def test_the_memory_of_the_copies_of_all_graphs() -> None:
    model = autoamp.convert(Regions(), **BF16)
    x = torch.randn(4, 8)
    for records in (True, False):  # two graphs share the copies, inside regions too
        with torch.set_grad_enabled(records):
            model(x)
    report = autoamp.report(model)
    held = [copy.kept for p in model.parameters() for copy in copies_of(p)]
    assert len(report.graphs) == 2
    assert report.cast_counts.kept == len(held) == 6
    assert report.cast_counts.kept_bytes == sum(low.nbytes for low in held)
    says(" ".join(str(report).split()), "6 weights", "bf16 (432 B)")


def test_inference_has_no_backward() -> None:
    model = autoamp.convert(
        nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)),
        precision="bf16",
        do_no_harm=False,
    ).eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
        counts, (forward, backward, _) = ran(model, lambda: model(torch.randn(4, 8)))
    assert counts.cast_count(phase="forward") == forward > 0
    assert backward == 0
    assert "in each backward" not in str(autoamp.report(model))


def test_weights_copied_anew_in_every_call() -> None:
    model = autoamp.convert(nn.Linear(8, 8), **BF16, weight_copies="every call")

    def step() -> None:
        model(torch.randn(4, 8)).sum().backward()

    step()
    counts, (forward, backward, kept) = ran(model, step)
    assert counts.refreshed == kept == 2
    assert counts.cast_count(phase="forward") == forward
    assert counts.cast_count(phase="backward") == backward
    told = f"{forward} casts run in each forward", f"{backward} in each backward"
    says(autoamp.report(model), *told)
