"""Models x precisions x targets: an export computes what the converted model does.

A program of torch's gives the same bits, as it is and loaded from its file, in which
the memory of each weight is laid as before.  An ONNX file is as true as the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoamp
from tests.logs import warned
from tests.models import BY_NAME, LARGE
from tests.tools.export.programs import dtypes_in, edited, plan_of, run, two

loops: Any = pytest.importorskip("torch._higher_order_ops.while_loop")
scans: Any = pytest.importorskip("torch._higher_order_ops.scan")


class UNet(nn.Module):
    """Convolutions with a skip connection, whose images are worth permuting."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        skip = self.norm(self.first(x)).relu()
        y = self.up(self.down(nn.functional.max_pool2d(skip, 2)).relu())
        return self.last(torch.cat([skip, y], 1))


class Structured(nn.Module):
    """Arguments by name, in a dict too, and results that nest."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(
        self, x: Tensor, *, scale: Any = None, more: Any = None, flag: bool = True
    ) -> Any:
        y = self.line(x) * scale + more["q"]
        return {"y": y, "z": (y.sum(), [x.shape[0]])} if flag else y


class Recurrent(nn.Module):
    """A layer whose kernels choose the dtype of their results."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        size = layer.hidden_size * (1 + getattr(layer, "bidirectional", False))
        self.layer, self.head = layer, nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Any:
        made = self.layer(x)
        return self.head(made[0]), made[1]


class Body(nn.Module):
    """A branch or a loop, whose bodies are planned too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = getattr(self, self.name)(x)
        return self.c(made)

    def cond(self, x: Tensor) -> Any:
        one, other = (lambda z: self.a(z).relu()), (lambda z: self.b(z).tanh())
        return torch.cond(x.sum() > 0, one, other, (x,))

    def nested(self, x: Tensor) -> Any:
        return torch.cond(x.mean() > 0, self.cond, lambda z: self.b(z).tanh(), (x,))

    def while_loop(self, x: Tensor) -> Any:
        def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.a(x).relu()

        start = torch.tensor(0), x
        return loops.while_loop(lambda i, _: i < 3, step, start)[1]

    def scan(self, x: Tensor) -> Any:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = (self.a(row) + state).tanh()
            return state, self.b(state)

        return scans.scan(step, torch.zeros(32), x)[1]


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, dict[str, Any]]]]


def of(make: Callable[[], nn.Module], *shape: int, **kwargs: Any) -> Case:
    return (lambda: make().eval()), (lambda: ((torch.randn(*shape),), kwargs))


def shared(name: str) -> Case:
    """A model of tests/models."""
    return (lambda: BY_NAME[name].model().eval()), (lambda: BY_NAME[name].inputs(0))


NAMED = {"more": {"q": torch.randn(64)}, "scale": torch.ones(1)}
SEQUENCE = (2, 7, 8)
ZOO = (
    *("gpt2", "bert", "llama", "t5", "vit", "resnet", "convnext", "unet", "lstm"),
    *("whisper", "mlp", "shared_weight", "checkpointed", "dict_in_out"),
)
CASES = {name: shared(name) for name in {*ZOO, *LARGE} & BY_NAME.keys()}
CASES |= {
    "two": of(two, 8, 64),
    "structured": of(Structured, 8, 64, flag=True, **NAMED),
    "one result": of(Structured, 8, 64, flag=False, **NAMED),
    "images": of(UNet, 2, 3, 32, 32),
    "images that train": ((lambda: UNet().train()), of(UNet, 2, 3, 32, 32)[1]),
    "norm and convolution": of(
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()),
        *(2, 3, 8, 8),
    ),
    "two lstms": of(
        lambda: Recurrent(nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)),
        *SEQUENCE,
    ),
    "gru": of(lambda: Recurrent(nn.GRU(8, 16)), *SEQUENCE),
    "cell": of(lambda: Recurrent(nn.LSTMCell(8, 16)), 7, 8),
    "rnn": of(lambda: Recurrent(nn.RNN(8, 16, nonlinearity="relu")), *SEQUENCE),
}
BODIES = ("cond", "nested", "while_loop", "scan")
CASES |= {name: of(lambda name=name: Body(name), 4, 32) for name in BODIES}

SLOW = {*LARGE, "bert"}
PROGRAMS = [(name, low) for name in ZOO if name in CASES for low in ("bf16", "fp16")]
PROGRAMS += [(name, "bf16") for name in ("structured", "one result", "gru", "cell")]
PROGRAMS += [(name, "bf16") for name in ("images", "images that train", "two lstms")]
PROGRAMS += [("rnn", "bf16")]
FILES = [(name, "fp16") for name in (*sorted(LARGE - {"nn_transformer"}), "bert")]
FILES += [(name, "fp16") for name in ("two", "gru", "cell", "rnn", *BODIES)]


def marked(rows: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(name, low, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, low in rows
    ]


def tensors(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if torch.is_tensor(each)]


def assert_same(some: Any, others: Any) -> None:
    """One structure, one dtype each, and the same bits."""
    ours, spec = pytree.tree_flatten(some)
    theirs, other = pytree.tree_flatten(others)
    assert spec == other
    for each, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(each, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("bf16_units")  # where a layout pays
@pytest.mark.parametrize(("name", "low"), marked(PROGRAMS))
def test_a_program_gives_the_converted_models_bits(
    name: str, low: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, (args, kwargs), path = make(), inputs(), tmp_path / "m.pt2"
    converted = autoamp.convert(model, precision=low, do_no_harm=False)
    program = autoamp.export(converted, args, kwargs, out=path)
    assert not [line for line in warned(caplog) if "differs" in line]
    loaded = autoamp.load(path)
    with torch.no_grad():
        expected = converted(*args, **kwargs)
        turned = dict(reversed(kwargs.items()))
        assert_same(program.module()(*args, **kwargs), expected)
        assert_same(loaded.module()(*args, **turned), expected)
    assert dtypes_in(program) != {torch.float32}
    held, read = program.state_dict, loaded.state_dict
    assert {n: t.stride() for n, t in read.items()} == {
        n: t.stride() for n, t in held.items()
    }
    laid = [t for t in held.values() if t.dim() == 4 and not t.is_contiguous()]
    assert bool(laid) or "images" not in name
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    assert not any("autoamp" in str(node.target) for node in calls)
    names = {n.name for n in program.graph.find_nodes(op="placeholder")}
    assert {"x", "scale"} <= names or name != "structured"


def widen_a_body(model: Any) -> None:
    """A body is given fp32 by the graph round it, or casts to fp32 itself."""
    graphs = [model.graph]
    for node in model.graph.node:
        graphs += [a.g for a in node.attribute if a.HasField("g")]
    for cast in (n for graph in graphs for n in graph.node if n.op_type == "Cast"):
        cast.attribute[0].i = onnx.TensorProto.FLOAT


@pytest.mark.parametrize(("name", "low"), marked(FILES))
def test_an_onnx_file_is_as_true_as_the_converted_model(
    name: str, low: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, (args, kwargs), path = make(), inputs(), tmp_path / "m.onnx"
    with torch.no_grad():
        exact = copy.deepcopy(model)(*args, **kwargs)
    converted = autoamp.convert(model, precision=low, do_no_harm=False)
    program = autoamp.export(converted, args, kwargs, target="onnx", out=path)
    loaded = autoamp.load(path)
    assert loaded.opset_import[0].version >= 20
    assert len(loaded.graph.input) == len(tensors((args, kwargs)))
    with torch.no_grad():
        ours = converted(*args, **kwargs)
    theirs = run(path, *tensors((args, kwargs)))
    step = 2 * torch.finfo(torch.float16).eps
    for true, one, other in zip(tensors(exact), tensors(ours), theirs, strict=True):
        # The error of one number, such as a loss, is chance.
        if not true.is_floating_point() or true.numel() == 1:
            continue
        errors = [float((each - true).norm()) for each in (one, other)]
        apart = float((one - other).abs().max())
        is_near = apart <= step * max(1.0, float(one.abs().max()))
        assert errors[1] <= 1.1 * errors[0] or is_near
    if name in BODIES:
        nodes = plan_of(program)["nodes"]
        inner = {n.rpartition(".")[2]: nodes[n]["dtypes"] for n in nodes if "." in n}
        assert inner["linear"] == ["float16"]
        with pytest.raises(autoamp.ExportError):
            autoamp.load(edited(path, tmp_path / "other.onnx", widen_a_body))


def test_an_lstm_in_fp16_runs_whatever_kernels_this_machine_has(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    make, inputs = CASES["two lstms"]
    model, (args, _) = make(), inputs()
    bound = 8 * torch.finfo(torch.float16).eps  # results are below one
    with torch.no_grad():
        exact = model(*args)[0]
        converted = autoamp.convert(model, precision="fp16", do_no_harm=False)
        assert float((converted(*args)[0] - exact).abs().max()) <= bound
        autoamp.export(converted, args, out=tmp_path / "m.pt2")
        given = torch.export.load(tmp_path / "m.pt2").module()(*args)[0]
    assert float((given - exact).abs().max()) <= bound


def test_bf16_takes_an_onnx_opset_whose_ops_take_it(tmp_path: Path) -> None:
    make, inputs = CASES["norm and convolution"]
    path = tmp_path / "m.onnx"
    options = {"precision": "bf16", "do_no_harm": False}
    autoamp.export(make(), inputs()[0], target="onnx", out=path, **options)
    made = onnx.load(path)
    onnx.checker.check_model(made, full_check=True)
    assert made.opset_import[0].version == 22
    assert onnx.TensorProto.BFLOAT16 in {i.data_type for i in made.graph.initializer}


# -- where torch captures otherwise, the difference is told --------------------------


def test_an_encoder_that_torch_captures_otherwise_is_as_true(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(3, 7, 32)
    exact = copy.deepcopy(model).double()(x.double())
    converted = autoamp.convert(model, precision="bf16", do_no_harm=False)
    program = autoamp.export(converted, (x,))
    assert any("converted model" in line for line in warned(caplog))
    with torch.no_grad():
        errors = [float((m(x) - exact).norm()) for m in (program.module(), converted)]
    assert errors[0] <= 1.1 * errors[1]
