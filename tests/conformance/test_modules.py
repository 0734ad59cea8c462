"""Every torch.nn module: no crash, fp32 outside, errors within what rounding can do.

The samples of torch's `module_db` go through the pass as whole graphs (`rewrite`),
which shows the graph that the bound on the error is derived from; the first of each
module goes through `convert(strict=True)` as well.  A sample of which nothing is low
must be bit for bit what it is in fp32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_modules import ModuleInfo
from torch.utils import _pytree as pytree

import autoamp
from autoamp.errors import CaptureError
from autoamp.options import Options
from autoamp.pipeline.run import rewrite_graph
from tests.conformance import error_bound
from tests.conformance.module_samples import MODULES, Sample, refused, samples
from tests.conformance.table import Figures
from tests.strategies import Outcome, capture, run
from tests.whole.test_laws import denying, same_outcome

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NO_ONE_GRAPH = ("data-dependent", "DynamicOutputShape")
"""What torch says where a graph would depend on the values of tensors."""

BOUNDED = 2
"""Samples of a module and mode that a bound is derived for: those are dear."""

pytestmark = pytest.mark.filterwarnings(
    # torch's own, about Intel GPUs, when oneDNN is switched off or on again.
    "ignore:TF32 acceleration on top of oneDNN:UserWarning",
    # and of modules as torch's samples build and call them.
    "ignore:reduction. 'mean' divides the total loss:UserWarning",
    "ignore:linear_cross_entropy. ``options`` ignored:UserWarning",
    "ignore:enable_nested_tensor is True:UserWarning",
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "ignore:Using a target size .* that is different to the input size:UserWarning",
)

every_module = pytest.mark.parametrize("info", MODULES, ids=lambda m: m.name)
both_precisions = pytest.mark.parametrize("precision", DTYPES)


def modes(info: ModuleInfo) -> tuple[bool, ...]:
    """Whether to train; evaluation too where torch says that it differs."""
    return (True, False) if info.train_and_eval_differ else (True,)


def in_fp32(sample: Sample) -> Outcome:
    model = copy.deepcopy(sample.model)
    return run(model, model, sample.given())


def same_outside(ours: Outcome, expected: Outcome) -> None:
    """Asserts that structure, dtypes and shapes are those of fp32."""
    pairs = ((ours.result, expected.result), (ours.buffers, expected.buffers))
    for mine, theirs in (*pairs, (ours.gradients, expected.gradients)):
        left, right = pytree.tree_flatten(mine), pytree.tree_flatten(theirs)
        assert left[1] == right[1]
        for a, b in zip(left[0], right[0], strict=True):
            if isinstance(b, Tensor):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
    dtypes = {g.dtype for g in (ours.gradients or {}).values()}
    assert dtypes <= {torch.float32}


def error_over_bound(
    gm: fx.GraphModule, given: tuple[Tensor, ...], made: list[Tensor]
) -> float:
    """The largest error of results and gradients, over what rounding can do.

    Args:
        made: the results as every kernel of torch's choice made them; the graph that
            shows each rounding leaves out two that round many times inside, flash
            attention and oneDNN's LSTM.
    """
    weights = dict(gm.named_parameters())
    has_lstm = any("lstm" in str(n.target) for n in gm.graph.nodes)

    def call(weights: dict[str, Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
        weights = {n: w.detach().requires_grad_() for n, w in weights.items()}
        torch.manual_seed(3)
        made = torch.func.functional_call(gm, weights, given)
        results = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
        ends = [t for t in results if t.requires_grad]
        leaves = [t for t in (*weights.values(), *given) if t.requires_grad]
        if not (ends and leaves):
            return results
        slopes = [torch.linspace(0.5, 1, t.numel()).reshape(t.shape) for t in ends]
        found = torch.autograd.grad(ends, leaves, slopes, allow_unused=True)
        return [*results, *(g for g in found if g is not None)]

    flags = torch.backends.mkldnn.flags(enabled=not has_lstm)
    with sdpa_kernel(SDPBackend.MATH), flags:
        graph = error_bound.traced(call, (weights, given))
        found, is_exact = error_bound.exact(graph, [*weights.values(), *given])
    traced = error_bound.worst(found, is_exact)
    return max(traced, error_bound.worst([*made, *found[len(made) :]], is_exact))


def fallen_back(sample: Sample, precision: str) -> Outcome:
    """What a converted model does that cannot be captured as a whole, if at all."""
    model = copy.deepcopy(sample.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was not captured, said once
        autoamp.convert(model, precision=precision, do_no_harm=False)
        return run(model, model, sample.given())


@both_precisions
@every_module
def test_module(info: ModuleInfo, precision: str, figures: Figures) -> None:
    for training in modes(info):
        bounded = 0
        for sample in samples(info, training):
            if refused(sample):
                figures.count("samples that fp32 refuses")
                continue
            expected = in_fp32(sample)
            model, given = copy.deepcopy(sample.model), sample.given()
            options = Options(precision=precision, do_no_harm=False)
            graph = capture(model, len(given))
            try:
                found = rewrite_graph(graph, given, options, DTYPES[precision])
            except CaptureError as error:
                if not any(cause in str(error) for cause in NO_ONE_GRAPH):
                    raise
                same_outside(fallen_back(sample, precision), expected)
                figures.count("samples of no one graph")
                continue
            ours = run(found.gm, model, given)
            same_outside(ours, expected)
            if not found.assignment.low:
                same_outcome(ours, expected)
                figures.count("samples in fp32, bit for bit")
                continue
            figures.count("samples low")
            if bounded < BOUNDED:
                bounded += 1
                made = [
                    t for t in pytree.tree_leaves(ours.result) if torch.is_tensor(t)
                ]
                ratio = error_over_bound(found.gm, sample.given(), made)
                figures.count("samples bounded")
                figures.worst("error over bound", ratio)
                assert ratio <= 1, sample.name


@both_precisions
@every_module
def test_module_converted(info: ModuleInfo, precision: str, figures: Figures) -> None:
    for training in modes(info):
        for sample in first(info, training):
            expected = in_fp32(sample)
            model = copy.deepcopy(sample.model)
            options = {"precision": precision, "do_no_harm": False}
            autoamp.convert(model, **options, strict=True)
            if not graphs_of_dynamo(sample):
                with pytest.raises(CaptureError, match="ran no rewritten graph"):
                    run(model, model, sample.given())
                figures.count("of which Dynamo makes no graph")
                continue
            ours = run(model, model, sample.given())
            same_outside(ours, expected)
            if not autoamp.report(model).casts:
                same_outcome(ours, expected)
            figures.count("converted")


@every_module
def test_module_denied(info: ModuleInfo, figures: Figures) -> None:
    for training in modes(info):
        for sample in first(info, training):
            if not graphs_of_dynamo(sample):
                continue
            expected = in_fp32(sample)
            model, given = copy.deepcopy(sample.model), sample.given()
            autoamp.convert(
                model,
                precision="bf16",
                rules=denying(copy.deepcopy(sample.model), *given),
                do_no_harm=False,
                strict=True,
            )
            same_outcome(run(model, model, given), expected)
            figures.count("denied, bit for bit")


def graphs_of_dynamo(sample: Sample) -> int:
    """Graphs that plain `torch.compile` makes of a sample.

    None of what branches on values within torch's own functions, whose frames Dynamo
    skips: `gaussian_nll_loss`.  (`nn.RNN` and its like are captured only if asked for.)
    """
    made: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: list[Tensor]) -> fx.GraphModule:
        made.append(gm)
        return gm

    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(copy.deepcopy(sample.model), backend=keep)(*sample.given())
    torch._dynamo.reset()
    return len(made)


def first(info: ModuleInfo, training: bool) -> Iterator[Sample]:
    """The first sample that fp32 runs."""
    for sample in samples(info, training):
        if not refused(sample):
            yield sample
            return


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
def test_recurrent_modules_are_low_only_where_torch_runs_them_in_half(
    kind: type[torch.nn.RNNBase],
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
    assert len(MODULES) >= 114


def test_the_bound_can_fail() -> None:
    """Results that are off by more than rounding are seen."""
    weight = torch.randn(64, 64)

    def call(x: Tensor) -> list[Tensor]:
        return [x.bfloat16() @ weight.bfloat16()]

    x = torch.randn(8, 64)
    found, is_exact = error_bound.exact(error_bound.traced(call, (x,)), (x,))
    assert error_bound.worst(found, is_exact) <= 1
    off = [found[0] + 2**-2 * found[0].abs()]
    assert error_bound.worst(off, is_exact) > 1
