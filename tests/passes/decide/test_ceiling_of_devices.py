"""Nothing is low that `torch.autocast` of the device leaves fp32.

Autocast itself is asked: each graph is run op by op on fake tensors of the device, in a
region of autocast, which a CPU build of torch can do for CUDA too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.decide.devices import named_device
from autoamp.passes.graph_record import Rewritten, Setting
from autoamp.passes.run import rewrite_graph, rewrite_normalised
from autoamp.passes.see.normalise import Normalised, normalise
from autoamp.training.options import Options
from tests.models import BY_NAME, CASES, Case
from tests.quick import each_with_one, some_slow
from tests.strategies import capture

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICES = {"h100": "cuda", "a100": "cuda", "cpu": "cpu"}
WITHOUT_A_GPU = ("is not linked with support", "NVIDIA driver")
"""Errors of ops that ask the GPU itself what they give for fake tensors."""


class UnderAutocast(fx.Interpreter):
    """Runs a graph op by op on fake tensors, and keeps what each op gives."""

    def __init__(self, gm: fx.GraphModule, device: str) -> None:
        super().__init__(gm)
        self.device = torch.device(device, 0 if device == "cuda" else None)
        self.made: dict[str, Any] = {}

    def fake(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = ([*map(compat.hint, t)] for t in (value.shape, value.stride()))
            return torch.empty_strided(*layout, dtype=value.dtype, device=self.device)
        return self.device if isinstance(value, torch.device) else value

    def run_node(self, n: fx.Node) -> Any:
        # A graph inside a node, such as a loop's, has fp32 at its edges.
        bodies = any("val" not in each.meta for each in n.all_input_nodes)
        if bodies or n.op in ("placeholder", "get_attr"):
            self.made[n.name] = pytree.tree_map(self.fake, n.meta.get("val"))
        else:
            self.made[n.name] = super().run_node(n)
        return self.made[n.name]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.device, self.fake, (tuple(args), dict(kwargs))
        )
        try:
            return super().call_function(target, args, kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in WITHOUT_A_GPU):
                # The user would have to cast, and casts to fp32.
                wide = pytree.tree_map_only(Tensor, widened, args)
                return super().call_function(target, wide, kwargs)
        # Type promotion, which decides on such an op, is that of any device.
        here = pytree.tree_map_only(Tensor, lambda t: t.to("cpu"), (args, kwargs))
        made = super().call_function(target, *here)
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device), made)


def widened(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def floats(value: Any) -> set[torch.dtype]:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return {t.dtype for t in tensors if t.is_floating_point()}


OPTIONS = Options(do_no_harm=False, strict=True, fuse=False)


def setting(name: str, low: torch.dtype) -> Setting:
    device = named_device(name, low) if DEVICES[name] == "cuda" else None
    return Setting(free_weights=True, device=device)


def less_true_anywhere(gm: fx.GraphModule, given: Any) -> Iterator[str]:
    """The low ops whose results autocast has in fp32, on each device and in each dtype.

    A graph is traced once for each type of device, since its trace depends on no more,
    and autocast is asked once for each type of device and each dtype.
    """
    traces: dict[str, Normalised] = {}
    for low in LOW.values():
        results: dict[tuple[str, fx.Graph], dict[str, Any]] = {}
        for name, device in DEVICES.items():
            on = setting(name, low)
            # A graph inside of another is rewritten where it is.
            if device not in traces or has_bodies(traces[device].gm):
                traces[device] = normalise(gm, given, on.device_type)
            found = rewrite_normalised(traces[device], OPTIONS, low, on, {})
            for each in found.with_bodies():
                key = device, each.before.graph
                if key not in results:
                    results[key] = under_autocast(each, device)
                for fault in lower_than(results[key], each):
                    yield f"{name}, {low}: {fault}"


def has_bodies(gm: fx.GraphModule) -> bool:
    return any(isinstance(child, fx.GraphModule) for child in gm.children())


def under_autocast(found: Rewritten, device: str) -> dict[str, Any]:
    """What each op of the graph that was rewritten gives under autocast."""
    run = UnderAutocast(found.before, device)
    region = compat.AutocastState(device, found.low, enabled=True)
    with FakeTensorMode(allow_non_fake_inputs=True), compat.in_autocast(region):
        run.run()
    return run.made


def less_true(found: Rewritten, device: str) -> Iterator[str]:
    """The low ops of a graph whose results autocast has in fp32."""
    return lower_than(under_autocast(found, device), found)


def lower_than(made: dict[str, Any], found: Rewritten) -> Iterator[str]:
    """The low ops of a graph whose results in `made` are fp32."""
    low = {found.low}
    for node in found.gm.graph.nodes:
        verdict = found.classified.verdicts.get(node.name)
        if verdict is None or floats(node.meta["val"]) != low:
            continue
        if floats(made[node.name]) & low:
            continue
        read = [u for u in node.users if floats(u.meta.get("val")) - low]
        # Every reader of a move rounds the numbers in any case.
        if not verdict.moves or read:
            yield f"{node.name} ({node.target}) is low, and autocast's is fp32"


# -- each op of the lists --------------------------------------------------------------


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda a: F.layer_norm(a, (16,)),
    "rms_norm": lambda a: F.rms_norm(a, (16,)),
    "group_norm": lambda a: F.group_norm(a, 4),
    "instance_norm": F.instance_norm,
    "softmax": lambda a: a.softmax(-1),
    "log_softmax": lambda a: a.log_softmax(-1),
    "special_softmax": lambda a: torch.special.softmax(a, -1),
    "sum": lambda a: a.sum(-1, keepdim=True),
    "sum_to_size": lambda a: a.sum_to_size(2, 16, 1),
    "mean": lambda a: a.mean(-1, keepdim=True),
    "prod": lambda a: a.prod(-1, keepdim=True),
    "cumsum": lambda a: a.cumsum(-1),
    "norm": lambda a: a.norm(dim=-1, keepdim=True),
    "linalg.norm": lambda a: torch.linalg.norm(a, dim=-1, keepdim=True),
    "vector_norm": lambda a: torch.linalg.vector_norm(a, dim=-1, keepdim=True),
    "normalize": lambda a: F.normalize(a, dim=-1),
    "trapezoid": lambda a: torch.trapezoid(a, dim=-1).unsqueeze(-1),
    "logsumexp": lambda a: a.logsumexp(-1, keepdim=True),
    "cosine_similarity": lambda a: F.cosine_similarity(a, a.flip(-1)).unsqueeze(1),
    "square": torch.square,
    "pow": lambda a: a**3,
    "a product with itself": lambda a: a * a,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p": lambda a: a.abs().log1p(),
    "rsqrt": lambda a: (a.abs() + 1).rsqrt(),
    "reciprocal": lambda a: (a.abs() + 1).reciprocal(),
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "prelu": lambda a: F.prelu(a, torch.tensor([0.2])),
    "addcmul": lambda a: torch.addcmul(a, a, a),
    "atan2": lambda a: torch.atan2(a, a + 1),
    "upsample, nearest": lambda a: F.interpolate(a, scale_factor=2.0),
    "upsample, linear": lambda a: F.interpolate(a, scale_factor=2.0, mode="linear"),
    "pad, reflect": lambda a: F.pad(a, (2, 2), mode="reflect"),
    "pad, replicate": lambda a: F.pad(a, (2, 2), mode="replicate"),
    "pad, circular": lambda a: F.pad(a, (2, 2), mode="circular"),
    "pad": lambda a: F.pad(a, (2, 2)),
    "avg_pool1d": lambda a: F.avg_pool1d(a, 2),
    "max_pool1d": lambda a: F.max_pool1d(a, 2),
    "max_pool3d": lambda a: F.max_pool3d(a[None, None], 2)[0, 0],
    "avg_pool3d": lambda a: F.avg_pool3d(a[None, None], 2)[0, 0],
    "adaptive_max_pool3d": lambda a: F.adaptive_max_pool3d(a[None, None], 2)[0, 0],
    "max_unpool1d": lambda a: F.max_unpool1d(
        *F.max_pool1d(a, 2, return_indices=True), 2
    ),
    "trace": lambda a: a[0].trace() + a,
    "dropout": lambda a: F.dropout(a, 0.5),
    "cat with fp32": lambda a: torch.cat([a, torch.ones(2, 16, 16)], -1),
    "tensordot with fp32": lambda a: torch.tensordot(a, torch.ones(16, 16), 1),
    "inner with fp32": lambda a: torch.inner(a, torch.ones(16, 16)),
    "bilinear": lambda a: F.bilinear(a, a, torch.ones(16, 16, 16)),
    "in place": lambda a: (a + a).exp_(),
}
"""Functions of a low value of 2 x 16 x 16."""

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "read in fp32": lambda h: h.sigmoid() - 0.5 * h,
    "rounded": lambda h: h @ h.mT,
}


class Reads(nn.Module):
    """A function of what a linear gives, and a reader of the function."""

    def __init__(self, name: str, reader: str) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.function, self.reader = OPS[name], READERS[reader]

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.function(self.fc(x)))


@pytest.mark.parametrize(("op", "reader"), each_with_one(OPS, [*READERS]))
def test_no_op_is_low_that_autocast_of_the_device_has_in_fp32(
    op: str, reader: str
) -> None:
    """CI has each op on each device in each dtype, with one reader in turn."""
    gm, x = capture(Reads(op, reader), 1), torch.randn(2, 16, 16)
    assert [*less_true_anywhere(gm, [x])] == []


def test_a_norm_that_a_product_alone_reads_may_be_low() -> None:
    """It reads low values and rounds once, where the product would round them."""

    def low_on_cuda(function: Callable[[Tensor], Tensor], weighs: bool) -> set[str]:
        model = Reads("sigmoid", "rounded")
        norm = nn.LayerNorm(16, elementwise_affine=weighs)
        model.add_module("norm", norm)
        model.function, model.reader = norm, function
        x, low = torch.randn(2, 16, 16), torch.bfloat16
        on = vars(setting("h100", low))
        found = rewrite_graph(capture(model, 1), [x], OPTIONS, low, **on)
        return set(found.assignment.low)

    assert "layer_norm" in low_on_cuda(lambda h: h @ torch.ones(16, 16), False)
    assert "layer_norm" not in low_on_cuda(lambda h: h.sigmoid(), False)
    # A low kernel would read the norm's weight rounded, which autocast does not.
    assert "layer_norm" not in low_on_cuda(lambda h: h @ torch.ones(16, 16), True)


def test_a_user_may_move_an_op_that_autocast_lists() -> None:
    model, x = Reads("layer_norm", "read in fp32"), torch.randn(2, 16, 16)
    gm, device = capture(model, 1), named_device("h100", torch.bfloat16)
    options = Options(do_no_harm=False, strict=True, infer=["layer_norm"])
    found = rewrite_graph(gm, [x], options, torch.bfloat16, device=device)
    assert "layer_norm" in found.assignment.low
    assert [*less_true(found, "cuda")]


# -- every model -----------------------------------------------------------------------


def graphs_of(case: Case) -> list[tuple[fx.GraphModule, list[Any]]]:
    """The graphs that Dynamo captures of a case, and what each is given."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        found.append((gm, [n.meta["example_value"] for n in inputs]))
        return gm.forward

    args, kwargs = case.inputs(0)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled: Any = torch._dynamo.optimize(backend)(case.model())
        compiled(*args, **kwargs)
    return found


LIKE_OTHERS = ("gpt2", "gpt2_dropout", "nn_transformer", "vit", "whisper")
"""Large models whose ops are those of llama, bert and t5, which CI looks at."""


@pytest.mark.parametrize(
    "name", some_slow([c.name for c in CASES], LIKE_OTHERS.__contains__)
)
def test_no_model_is_low_where_autocast_of_the_device_is_not(name: str) -> None:
    """CI has a model of each kind on each device in each dtype."""
    case = BY_NAME[name]
    graphs = graphs_of(case)
    assert graphs
    for gm, given in graphs:
        assert [*less_true_anywhere(gm, given)] == []
