"""What a script under the automatic mode is told: few lines, and nothing untrue."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.processes import run_script
from tests.says import says
from tests.small_models import BF16, Of, mlp

MANY = 12
"""More than torch._dynamo.config.recompile_limit, which is 8."""

REGION: dict[str, Any] = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autoamp")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What autoamp said, but for signs of life on a slow machine."""
    ours = [r for r in caplog.records if r.name.startswith("autoamp")]
    lines = [r.getMessage() for r in ours if r.levelno >= logging.INFO]
    return [line for line in lines if "the first call of" not in line]


# -- on stderr, by variables alone -----------------------------------------------------

MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
x = torch.randn(8, 64)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16, OWN):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
for region in (torch.no_grad(), torch.inference_mode()):
    with region, torch.autocast("cpu", torch.bfloat16, OWN):
        model(x)
"""

AT_ONCE = {"AUTOAMP_PRECISION": "bf16", "AUTOAMP_DO_NO_HARM": "0"}


@pytest.mark.parametrize(
    ("own", "variables", "most", "named"),
    [
        (False, AT_ONCE, 3, ["Sequential", "converted to bf16"]),
        (False, {"AUTOAMP_PRECISION": "bf16", "AUTOAMP_HOT": "0"}, 3, ["Sequential"]),
        (False, {**AT_ONCE, "AUTOAMP_BACKEND": "x"}, 1, ["off", "AUTOAMP_BACKEND"]),
        (False, {"AUTOAMP_PRECISION": "fp17"}, 1, ["fp17"]),
        (False, {"AUTOAMP_HOT": "perhaps"}, 1, ["AUTOAMP_HOT"]),
        (True, AT_ONCE, 1, ["script's own autocast"]),
    ],
)
def test_a_script_gets_few_lines(
    own: bool, variables: dict[str, str], most: int, named: list[str]
) -> None:
    done = run_script(f"OWN = {own}{MODEL}", AUTOAMP_ENABLE="1", **variables)
    assert done.returncode == 0, done.stderr
    assert 1 <= len(done.stderr.splitlines()) <= most, done.stderr
    says(done.stderr, *named)
    assert "not hot" not in done.stderr


SET_UP = {
    "dictConfig": "config.dictConfig({'version': 1})",
    "dictConfig that names us": (
        "config.dictConfig({'version': 1, 'loggers': {'autoamp': {'handlers': []}}})"
    ),
    "fileConfig": "config.fileConfig(ini)",
    "no handlers": "logging.getLogger('autoamp').handlers.clear()",
}
"""What a script does with `logging`, and does not mean our lines."""

WANTED = {
    "level": "logging.getLogger('autoamp').setLevel(logging.CRITICAL)",
    "disable": "logging.disable(logging.CRITICAL)",
}
"""What a script does where it wants to see no line of ours."""

SPEAKS = """
import io, logging
from logging import config
ini = io.StringIO(
    "[loggers]\\nkeys=root\\n[handlers]\\nkeys=\\n[formatters]\\nkeys=\\n"
    "[logger_root]\\nlevel=WARNING\\nhandlers=\\n"
)
import autoamp
import autoamp.tools
known = logging.root.manager.loggerDict.items()
names = [n for n, each in known if "autoamp" in n and isinstance(each, logging.Logger)]
assert len(names) > 20
IS_ON and autoamp.enable()
for _ in range(2):  # levels are remembered
    DOES
    for name in names:
        logging.getLogger(name).warning("line of %s", name)
        logging.getLogger(name).info("news of %s", name)
assert not IS_ON or logging.getLogger("autoamp").level >= logging.INFO
print(len(names))
"""


@pytest.mark.parametrize("how", SET_UP)
@pytest.mark.parametrize("mode", ["convert", "automatic"])
def test_the_set_up_of_logging_loses_no_line(how: str, mode: str) -> None:
    is_on = mode == "automatic"
    source = SPEAKS.replace("DOES", SET_UP[how]).replace("IS_ON", str(is_on))
    source = source.replace("config.fileConfig", "ini.seek(0); config.fileConfig")
    done = run_script(source)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert sum("line of autoamp" in line for line in lines) == 2 * int(done.stdout)
    assert sum("news" in line for line in lines) == 2 * int(done.stdout) * is_on


@pytest.mark.parametrize("how", WANTED)
@pytest.mark.parametrize("speaks", ["mode", "line at exit"])
def test_a_script_that_wants_no_lines_gets_none(how: str, speaks: str) -> None:
    on = speaks == "mode"
    source = f"import logging, torch\n{WANTED[how]}\n"
    source += SPEAKS.replace("DOES", WANTED[how]).replace("IS_ON", str(on))
    source += "torch.nn.Linear(2, 2)(torch.ones(2, 2))\n"
    done = run_script(source, AUTOAMP_ENABLE="1")
    assert (done.returncode, done.stderr) == (0, "")


# -- each fact once --------------------------------------------------------------------


def test_that_a_model_is_not_converted_is_said_of_each(caplog) -> None:
    """No second model of a class is silent, and a hundred models are few lines."""
    models = [nn.Linear(2, 2).double() for _ in range(100)]
    for model in models * 2:
        autoamp.convert(model)
    lines = said(caplog)
    assert len({*lines}) == len(lines)
    counts = [line.partition("holds for ")[2].partition(" ")[0] for line in lines]
    assert counts == ["", "2", "3", "4", "8", "16", "32", "64"]


def test_that_nothing_of_a_model_runs_low_is_said_of_each(caplog, off_again) -> None:
    autoamp.enable(precision="bf16", do_no_harm=False, deny=["linear"])
    models = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)]
    for model in models * 3:
        model(torch.ones(1, 2))
    assert len([line for line in said(caplog) if "stays in fp32" in line]) == 2


def test_thirty_models_of_a_class_say_it_once(caplog) -> None:
    alive = [autoamp.convert(mlp(), **BF16) for _ in range(30)]
    for model in alive:  # a graph that nobody has any more would be captured again
        model(torch.randn(2, 8))
    (line,) = said(caplog)
    says(line, "Sequential", "bf16")


# -- under the script's own autocast ---------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())

    def encode(self, x: Tensor) -> Tensor:
        return self.a(x)


def in_a_region(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    with torch.autocast(**REGION):
        return call(x)


def wrapped(model: Net, x: Tensor) -> Tensor:
    """As Accelerate does, where Dynamo cannot go on inside the wrapper."""
    if "forward" not in vars(model):
        inner = model.forward

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(**REGION):
                torch._dynamo.graph_break()
                return inner(x)

        model.forward = forward  # type: ignore[method-assign]
    return model(x)


CALLS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "region": in_a_region,
    "method": lambda model, x: in_a_region(model.encode, x),
    "wrapped": wrapped,
}


@pytest.mark.usefixtures("automatic")
@pytest.mark.parametrize("how", CALLS)
def test_one_line_says_that_a_model_is_left_to_autocast(how: str, caplog) -> None:
    model, x = Net(), torch.randn(4, 16)
    for _ in range(3):
        CALLS[how](model, x)
    (line,) = said(caplog)
    says(line, "Net", "autocast")


@pytest.mark.usefixtures("automatic")
def test_so_it_says_of_a_converted_model_and_of_a_compiled_function(caplog) -> None:
    a, x = torch.randn(16, 16), torch.randn(4, 16)
    product = torch.compile(lambda x: x @ a @ a, backend="eager")
    in_a_region(product, x)
    (line,) = said(caplog)
    says(line, "()", "autocast")
    caplog.clear()
    model = Net()
    model(x)
    for _ in range(3):
        in_a_region(model, x)
    assert len([line for line in said(caplog) if "autocast" in line]) == 1


@pytest.mark.usefixtures("automatic")
def test_nothing_is_said_of_losses_and_lone_layers(caplog) -> None:
    x = torch.randn(4, 16)
    with torch.autocast(**REGION):
        nn.Linear(16, 16)(x)
        nn.MSELoss()(x, x)
    assert said(caplog) == []


# -- nothing is counted that did not happen --------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


def kind_of_block(number: int) -> type[Block]:
    """A class whose `forward` has a code object of its own."""
    names: dict[str, Any] = {}
    exec(f"def forward(self, x): return self.fc(x).relu() + {number}.0", names)
    return type(f"Block{number}", (Block,), {"forward": names["forward"]})


class Broken(nn.Module):
    """Blocks called in a loop that Dynamo leaves to Python."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(nn.functional.pad(x, (0, block.fc.in_features - x.shape[1])))
        return x


def low_products(model: nn.Module) -> int:
    rows = autoamp.report(model).ops
    return sum(row.op == "aten::linear.default" and row.is_low for row in rows)


@pytest.mark.parametrize("other", ["classes", "sizes"])
def test_every_block_is_converted_whatever_their_number(
    other: str, off_again: None
) -> None:
    if other == "classes":
        autoamp.enable(**BF16)
        model: nn.Module = Broken([kind_of_block(i)(8) for i in range(MANY)])
    else:
        model = autoamp.convert(Broken([Block(8 + i) for i in range(MANY)]), **BF16)
    model(torch.randn(2, 8))
    assert low_products(model) == MANY


def test_threads_that_race_at_a_new_size_all_run_rewritten_graphs() -> None:
    model = autoamp.convert(Broken([Block(8), Block(8)]), **BF16)
    model(torch.randn(3, 8))
    start = threading.Barrier(MANY)

    def work() -> None:
        start.wait()
        model(torch.randn(5, 8))

    threads = [threading.Thread(target=work) for _ in range(MANY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert autoamp.report(model).runs == 2 * (MANY + 1)


class FailsOnce(Block):
    """Its first call fails between its two graphs, as Dynamo itself may fail."""

    failed = False

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(_passed(self, super().forward(x)))


@torch._dynamo.disable
def _passed(block: FailsOnce, x: Tensor) -> Tensor:
    if not block.failed:
        block.failed = True
        raise torch._dynamo.exc.InternalTorchDynamoError("a fault of Dynamo's")
    return x


def test_a_graph_of_a_failed_call_is_told_of_once_a_finished_call_runs_it() -> None:
    model = autoamp.convert(FailsOnce(8), **BF16)
    model(torch.randn(2, 8))
    assert (autoamp.report(model).runs, low_products(model)) == (0, 0)
    for calls in (1, 2):
        model(torch.randn(2, 8))
        assert (autoamp.report(model).runs, low_products(model)) == (2 * calls, 2)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("torch._guards", "Error while creating guard:\n%s"),
        ("torch.fx.experimental.symbolic_shapes", "failed during evaluate_expr(%s)"),
        ("torch.utils._sympy.interp", "failed while executing %s"),
    ],
)
def test_lines_of_torch_on_a_failure_that_we_handle_are_for_who_asks(
    name: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    def shown(x: Any) -> Any:
        if isinstance(x.shape[0], torch.SymInt):  # an attempt with free sizes
            torchs.warning(line, x.shape)
            raise ValueError("no free sizes")
        return x * 2

    def rewritten() -> int:
        caplog.clear()
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.output(
            graph.call_function(shown, (graph.call_function(torch.mm, (x, x)),))
        )
        gm = torch.fx.GraphModule({}, graph)
        autoamp.rewrite(gm, (torch.ones(4, 4),), **BF16)
        return len([record for record in caplog.records if record.name == name])

    torchs = logging.getLogger(name)
    filters = [*torchs.filters]
    assert rewritten() == 0
    assert torchs.filters == filters
    with caplog.at_level(logging.INFO, name):  # as TORCH_LOGS sets it
        assert rewritten() >= 1


def test_a_region_without_torchs_lines_may_lie_in_another(caplog) -> None:
    torchs, line = logging.getLogger("torch._dynamo.convert_frame"), "WON'T CONVERT f"
    with autoamp.compat.quietly():
        with autoamp.compat.quietly():
            torchs.warning(line)
        torchs.warning(line)
        assert line not in caplog.messages
    torchs.warning(line)
    assert caplog.messages.count(line) == 1


def test_a_long_first_call_shows_signs_of_life(caplog, monkeypatch) -> None:
    module = "autoamp.runtime.entry.signs_of_life"
    signs = functools.partial(autoamp.messages.signs_of_life, every=0.05)
    monkeypatch.setattr(module, signs)

    class Slow(Block):
        """Its class was never captured, and a part of it takes time to trace."""

        def forward(self, x: Tensor) -> Tensor:
            _sleeps()
            return super().forward(x)

    autoamp.convert(Slow(8), **BF16)(torch.randn(2, 8))
    assert len([m for m in caplog.messages if "first call of Slow has taken" in m]) == 1


@torch._dynamo.disable
def _sleeps() -> None:
    time.sleep(0.3)


def neighbours(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(m.adjacent, torch.mm(x, m.weight))


def test_flops_that_nobody_counts_are_not_said_to_be_low(caplog) -> None:
    layer = Of(neighbours, weight=nn.Parameter(torch.randn(8, 8)))
    layer.adjacent = torch.eye(4).to_sparse()  # an attribute, as in graph networks
    model = nn.Sequential(nn.Linear(8, 8), layer)
    autoamp.convert(model, **BF16)(torch.randn(4, 8))
    report = autoamp.report(model)
    says(" ".join(str(report).split()), "1 part was not")
    assert json.loads(report.to_json())["coverage"]["parts_not_captured"] == 1
    says(said(caplog), "left to Python", "fp32", op="neighbours", line="test_said.py")


def test_a_wrapper_that_is_left_to_python_is_not_said_to_be_in_fp32(caplog) -> None:
    """All of what it calls runs low, so that only what is written in it could be."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        @contextlib.contextmanager
        def region(self) -> Iterator[None]:
            torch._dynamo.graph_break()
            yield

        def forward(self, x: Tensor) -> Tensor:
            with self.region():
                return self.inner(x)

    model = autoamp.convert(Wrapper(), **BF16)
    model(torch.randn(2, 8))
    assert autoamp.report(model).coverage.share_of_flops == 1
    says(said(caplog), "left to Python", "written there", line="test_said.py")
