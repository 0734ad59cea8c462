"""On a GPU, without one: what the pass makes of every test model there.

Dynamo captures the models on fake CUDA tensors, which a CUDA build of torch runs on any
machine (`make test-cuda-fake`).  Nothing is computed: this is about which op runs in
which precision, at whose price, and by whose rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.passes.functions import WITH_FP32_STATE
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.rules import Category, Rules
from autoamp.passes.run import rewrite_graph
from autoamp.runtime.eligible import choose_device_precision
from autoamp.training.options import Options
from tests.fake_cuda import (
    SKIPPED,
    as_gpu,
    autocast,
    graphs_of,
    moved,
    nothing_to_flatten,
    on_cuda,
)
from tests.models import BY_NAME, CASES, Case, distance
from tests.strategies import capture

CAPABILITIES = {"sm_70": (7, 0), "sm_80": (8, 0), "sm_90": (9, 0)}
PROFILES = [
    ("sm_70", torch.float16),
    ("sm_80", torch.float16),
    ("sm_80", torch.bfloat16),
    ("sm_90", torch.float16),
    ("sm_90", torch.bfloat16),
]
OF_CPUS = ("on cpu", "torch's CPU kernel")
"""What a reason says that is a fact about CPUs alone."""

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""What cuDNN has a kernel of, all of whose arguments autocast lowers (`_cudnn_rnn`)."""

NORMS = ("layer_norm", "group_norm")
"""Norms whose CPU kernels take fp32 parameters beside low data."""

pytestmark = [
    SKIPPED,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

each_case = pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=pytest.mark.slow) for c in CASES]
)


# -- what is checked -------------------------------------------------------------------


def calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (n for n in gm.graph.nodes if n.op == "call_function")


def floats(value: Any) -> set[torch.dtype]:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return {t.dtype for t in tensors if t.is_floating_point()}


def base(node: fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::")


def cpu_facts(found: Rewritten) -> list[str]:
    """Where a fact about CPUs has decided something."""
    leaks = []
    for graph in found.with_bodies():
        for name, verdict in graph.classified.verdicts.items():
            if any(text in verdict.reason for text in OF_CPUS):
                leaks.append(f"{name}: {verdict.reason}")
        for node in calls(graph.gm):
            if node.target in WITH_FP32_STATE.values():
                leaks.append(f"{node.name} keeps its state in fp32")
            if isinstance(node.target, OpOverload) and base(node) in NORMS:
                read = [n.meta["val"] for n in node.all_input_nodes]
                if len(floats(read)) > 1:
                    leaks.append(f"{node.name} reads {floats(read)}")
    return leaks


class _Autocast(fx.Interpreter):
    """Runs a graph op by op under autocast."""

    def __init__(self, gm: fx.GraphModule, low: torch.dtype) -> None:
        super().__init__(gm)
        self.low = low
        self.made: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.made[n.name] = super().run_node(n)
        return self.made[n.name]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = target._schema.name[6:] if isinstance(target, OpOverload) else ""
        if name == "_assert_tensor_metadata":
            return None
        if name in LAYERS:
            with autocast("cuda", self.low, enabled=False):
                return super().call_function(target, in_dtype(args, self.low), kwargs)
        try:
            return super().call_function(target, args, kwargs)
        except RuntimeError:  # autocast has no rule for it, and torch no kernel
            args = in_dtype(args, torch.float32)
            return super().call_function(target, args, kwargs)


def in_dtype(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )


def autocast_makes(found: Rewritten) -> dict[str, Any]:
    """What each op of the graph before gives under CUDA's autocast."""
    gm = found.before
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    run = _Autocast(gm, found.low)
    mode = next(v.fake_mode for v in inputs if isinstance(v, compat.FakeTensor))
    with mode, compat.as_traced(), autocast("cuda", found.low):
        run.run(*inputs)
    return run.made


def disagreements(found: Rewritten, made: dict[str, Any]) -> list[str]:
    """Ops low where autocast's are not, and products fp32 where autocast's are low.

    A move, or a kernel that rounds once, may be low where all that reads it is.
    """
    rules, wrong = Rules.load("torch-cuda"), []
    for node in calls(found.gm):
        verdict = found.classified.verdicts.get(node.name)
        if verdict is None or not isinstance(node.target, OpOverload):
            continue
        ours, theirs = floats(node.meta["val"]), floats(made[node.name])
        listed = rules.lookup(node.target)
        category = None if listed is None else listed.category
        low = ours == {found.low}
        if low and not verdict.moves and found.low not in theirs:
            wrong.append(f"{node.name} ({node.target}) is low, autocast's fp32")
        if low and category is Category.DENY and not verdict.moves:
            wrong.append(f"{node.name} is low, and autocast denies {node.target}")
        excused = verdict.pinned and verdict.category is Category.ALLOW
        allowed = category is Category.ALLOW and not excused
        if allowed and theirs == {found.low} and not low:
            wrong.append(f"{node.name} is fp32, and autocast lowers {node.target}")
    return wrong


def devices(gm: fx.GraphModule) -> set[str]:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    return {v.device.type for v in values if isinstance(v, Tensor) and v.ndim}


# -- every model -----------------------------------------------------------------------


@each_case
def test_models_on_every_gpu(case: Case) -> None:
    graphs = graphs_of(case)
    assert graphs
    for gm, given in graphs:
        for profile, low in PROFILES:
            with as_gpu(CAPABILITIES[profile]):
                options = Options(do_no_harm=False, strict=True)
                found = rewrite_graph(gm, given, options, low, free_weights=True)
            major, minor = CAPABILITIES[profile]
            name = found.assignment.prices.device.name
            assert name == f"CUDA {major}.{minor}"
            assert not found.given_up
            assert devices(found.gm) <= {"cuda"}
            assert not cpu_facts(found)
            if profile != "sm_90":  # its prices are others, its rules are not
                assert not disagreements(found, autocast_makes(found))


# -- every recurrent layer, whose state is a CPU's fact --------------------------------

RECURRENT = {
    "lstm": lambda: (nn.LSTM(6, 6), (5, 3, 6)),
    "gru": lambda: (nn.GRU(6, 6, num_layers=2, bidirectional=True), (5, 3, 6)),
    "rnn": lambda: (nn.RNN(6, 6), (5, 3, 6)),
    "lstm_cell": lambda: (nn.LSTMCell(6, 6), (3, 6)),
    "gru_cell": lambda: (nn.GRUCell(6, 6), (3, 6)),
    "rnn_cell": lambda: (nn.RNNCell(6, 6), (3, 6)),
}


def recurrent(name: str, low: torch.dtype, device: str) -> Rewritten:
    model, shape = RECURRENT[name]()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x = torch.randn(*shape)
    if device == "cuda":
        model, x = moved(model, mode), on_cuda(x, mode)
    options = Options(do_no_harm=False, strict=True)
    with as_gpu((9, 0)), nothing_to_flatten():
        return rewrite_graph(capture(model, 1), [x], options, low)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_have_no_cpu_state(name: str, low: torch.dtype) -> None:
    try:
        found = recurrent(name, low, "cuda")
    except CaptureError as error:
        if "NVIDIA driver" not in str(error):
            raise
        pytest.skip("torch asks the GPU itself what this op gives for fake tensors")
    assert found.assignment.low
    assert not cpu_facts(found)
    assert not disagreements(found, autocast_makes(found))


# -- the price -------------------------------------------------------------------------


def wide(width: int) -> Case:
    """Two products of matrices with sides of `width`: numbers that nobody holds."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))

    def inputs(_: int) -> Any:
        return (torch.empty(width, width),), {}

    return Case("wide", build, inputs, distance)


@pytest.mark.parametrize(("profile", "low"), PROFILES, ids=str)
def test_large_products_are_low_and_small_ones_are_not(
    profile: str, low: torch.dtype
) -> None:
    for width, expected in ((2048, True), (8, False)):
        ((gm, given),) = graphs_of(wide(width))
        with as_gpu(CAPABILITIES[profile]):
            found = rewrite_graph(gm, given, Options(strict=True), low)
        products = {n.name for n in calls(found.before) if base(n) == "linear"}
        assert (products <= found.assignment.low) is expected
        assert bool(found.assignment.low) is expected


def test_bf16_is_for_gpus_that_multiply_it() -> None:
    for profile, capability in CAPABILITIES.items():
        with as_gpu(capability):
            options = Options(precision="bf16")
            low, why = choose_device_precision(torch.device("cuda"), options)
        assert (low is None) is (profile == "sm_70"), why


# -- the checks can fail ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["gru", "gru_cell", "lstm_cell"])
def test_a_state_kept_as_on_cpus_is_seen(name: str) -> None:
    assert cpu_facts(recurrent(name, torch.bfloat16, "cpu"))


def test_a_norm_as_on_cpus_is_seen() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 6))
    options = Options(do_no_harm=False, strict=True)
    graph = capture(model, 1)
    found = rewrite_graph(graph, [torch.randn(3, 6)], options, torch.bfloat16)
    assert cpu_facts(found)


def test_an_op_in_the_wrong_list_is_seen() -> None:
    ((gm, given),) = graphs_of(BY_NAME["mlp"])
    for change in ({"infer": ["exp"]}, {"deny": ["linear"]}):
        options = Options(do_no_harm=False, strict=True).replace(**change)
        with as_gpu((9, 0)):
            found = rewrite_graph(gm, given, options, torch.float16)
        wrong = disagreements(found, autocast_makes(found))
        assert bool(wrong) is ("deny" in change), wrong
