"""`backend="auto"`: eager at once, compiled in the background, exchanged at a step."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autoamp
from autoamp import compat
from autoamp.capture import background
from autoamp.capture.background import Background
from autoamp.compat.pickled_graphs import dump_graph, load_graph
from autoamp.options import Options
from tests.processes import run_script
from tests.small_models import Of

BF16: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
LIMIT = 240.0

Process = subprocess.Popen[bytes]
JOBS: weakref.WeakKeyDictionary[Process, bytes] = weakref.WeakKeyDictionary()
"""The job of each process that was started under `compiled_once`."""


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory) -> Iterator[None]:
    """One cache for the module: equal graphs are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def made(monkeypatch) -> Iterator[list[Background]]:
    """Every graph that comes to be compiled in the test, which is to start early."""
    found: list[Background] = []
    begin = Background.__init__

    def noted(self: Background, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(Background, "__init__", noted)
    monkeypatch.setattr(background, "LEAST_CALLS", 3)
    monkeypatch.setattr(background, "SECONDS_A_NODE", 0.0)
    torch._dynamo.reset()
    yield found
    for each in found:
        if each._compilation is not None:
            each._compilation.end()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def done() -> set[bytes]:
    """The jobs of this module whose code is in its cache."""
    return set()


@pytest.fixture
def compiled_once(monkeypatch, done: set[bytes]) -> None:
    """Compiles no job that is done: what stands for its process ends at `wait`.

    A process takes ten seconds to find that the code is in the cache.  A job is known
    by all that its process is given, but for the settings of inductor: no test here
    changes one, and inductor itself sets some to what they are.
    """
    begin = compat.Compilation._begun

    def begun(self: compat.Compilation, job: Any) -> Process:
        settings = {k: v for k, v in job.settings.items() if k != "inductor"}
        known = pickle.dumps(dataclasses.replace(job, settings=settings))
        if known in done:
            (self._folder / "said").touch()
            return subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        process = begin(self, job)
        JOBS[process] = known
        return process

    def result(self: compat.Compilation) -> str:
        why = told(self)
        if not why and self._process in JOBS:
            done.add(JOBS[self._process])
        return why

    told = compat.Compilation.result
    monkeypatch.setattr(compat.Compilation, "_begun", begun)
    monkeypatch.setattr(compat.Compilation, "result", result)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def auto(model: nn.Module, **options: Any) -> nn.Module:
    return autoamp.convert(model, **{**BF16, "backend": "auto", **options})


def compiling(graph: Background) -> compat.Compilation:
    assert graph._compilation is not None, graph.state
    return graph._compilation


def wait(graph: Background) -> None:
    end = time.monotonic() + LIMIT
    process = compiling(graph)._process
    if process.args == ["cat"]:
        assert process.stdin is not None
        process.stdin.close()
    while not compiling(graph).is_over:
        assert time.monotonic() < end, "the compilation does not end"
        time.sleep(0.05)


class Training:
    """A training loop with two micro-batches a step.

    It is in fp16, whose graph has all that bf16's has and a loss scale: one job is
    compiled for all tests that train.
    """

    def __init__(self, backend: str) -> None:
        self.model = small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        autoamp.convert(
            self.model,
            self.optimizer,
            precision="fp16",
            do_no_harm=False,
            backend=backend,
        )
        torch.manual_seed(1)
        self.x = torch.randn(8, 32)

    def forward_and_backward(self, factor: float = 1.0) -> float:
        loss = self.model(self.x).square().mean()
        (loss * factor).backward()
        return loss.item()

    def step(self, factor: float = 1.0) -> float:
        self.forward_and_backward(factor)
        loss = self.forward_and_backward(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @property
    def state(self) -> str:
        (graph,) = json.loads(autoamp.report(self.model).to_json())["graphs"]
        return str(graph["background"])


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_once")
def test_a_loop_is_compiled_and_exchanged_between_steps(made) -> None:
    """The loss curve stays within the rounding of fp16 at every step."""
    eager, now = Training("eager"), Training("auto")
    wanted = [eager.step() for _ in range(10)]
    losses = [now.step()]
    (graph,) = made
    assert (now.state, graph.calls) == ("eager", 2)
    losses.append(now.step())
    assert now.state == "compiling"
    wait(graph)
    counters.clear()
    losses += [now.step() for _ in range(2)]  # the first notes the weights' versions
    assert now.state == "compiled"
    forward_and_backward = counters["inductor"]["fxgraph_cache_hit"] == 2
    assert forward_and_backward or counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert not counters["inductor"]["fxgraph_cache_miss"]
    report = autoamp.report(now.model)
    assert "runs as code that inductor compiled in the background" in report.full()
    assert {cast.compiled for cast in report.casts if cast.kind == "down"} == {
        "written"
    }
    assert report.runs == 8
    losses += [now.step() for _ in range(6)]
    # A loss of fp16 values is as far from eager's as fp16 rounds, 2 ** -11.
    torch.testing.assert_close(losses, wanted, rtol=2**-11, atol=0.0)
    assert losses[:3] == wanted[:3]


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_once")
def test_no_exchange_between_two_micro_batches(made) -> None:
    now = Training("auto")
    now.step()
    now.step()
    wait(made[0])
    for _ in range(4):
        now.forward_and_backward()
        assert now.state == "compiling"
    now.optimizer.step()
    now.forward_and_backward()
    assert now.state == "compiled"


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_once")
def test_a_backward_belongs_to_the_forward_that_was_run(made) -> None:
    """An eager forward's gradients are eager's, though the exchange came in between."""
    now, eager = Training("auto"), Training("eager")
    for each in (now, eager):
        each.step()
        each.step()
    wait(made[0])
    now.forward_and_backward()
    eager.forward_and_backward()
    pending = [each.model(each.x).square().mean() for each in (eager, now)]
    with torch.no_grad():
        for each in (eager, now):
            each.model[0].bias.add_(0.0)  # another step, as far as weights tell
    now.model(now.x)
    assert now.state == "compiled"
    for loss in pending:
        loss.backward()
    grads = [[p.grad for p in each.model.parameters()] for each in (eager, now)]
    for wanted, found in zip(*grads, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_once")
def test_a_compiled_backward_may_run_twice_over_a_retained_graph(made) -> None:
    now = Training("auto")
    for _ in range(2):
        now.step()
    wait(made[0])
    for _ in range(2):
        now.step()
    assert now.state == "compiled"
    loss = now.model(now.x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in now.model.parameters()]
    loss.backward()
    for first, both in zip(once, now.model.parameters(), strict=True):
        torch.testing.assert_close(both.grad, 2 * first)


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_once")
def test_loss_scaling_and_skipped_steps_go_on_across_the_exchange(made) -> None:
    eager, now = Training("eager"), Training("auto")
    before, factors = 0.0, [1.0, 1e30, 1.0, 1e30, 1.0, 1.0, 1e30, 1.0]
    told = []
    for step, factor in enumerate(factors):
        losses = eager.step(factor), now.step(factor)
        torch.testing.assert_close(losses[1], losses[0], rtol=2**-10, atol=1e-4)
        scales = [autoamp.report(each.model).loss_scale for each in (eager, now)]
        told.append(now.state)
        assert scales[0] is not None
        assert scales[1] is not None
        assert scales[0].skipped_steps == scales[1].skipped_steps
        if factor > 1:
            assert scales[1].scale < before
        before = scales[1].scale
        if step == 1:
            wait(made[0])
    assert scales[0].skipped_steps == 3
    assert told[0] == "eager"
    assert told[-1] == "compiled"


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_once")
def test_inference_is_exchanged_at_the_next_call(made) -> None:
    model = auto(small().eval())
    x = torch.randn(4, 32)
    with torch.no_grad():
        wanted = [model(x) for _ in range(3)][-1]
        wait(made[0])
        found = model(x)
    assert made[0].state == "compiled"
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)
    casts = [cast for cast in autoamp.report(model).casts if cast.every_call]
    assert {(c.kind, c.compiled) for c in casts} == {
        ("down", "written"),
        ("up", "written"),
    }


def test_without_auto_nothing_is_counted(made) -> None:
    model = autoamp.convert(small(), **BF16)
    for _ in range(5):
        model(torch.randn(4, 32))
    assert not made
    assert Options().later is False


def test_a_failed_compilation_leaves_the_graph_eager(made, monkeypatch, caplog) -> None:
    monkeypatch.setattr("autoamp.compat.apart._CHILD", "no_such_module")
    model, x = auto(small()), torch.randn(4, 32)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        wanted = [model(x) for _ in range(3)][-1]
        wait(made[0])
        for _ in range(4):
            assert torch.equal(model(x), wanted)
    told = [r.message for r in caplog.records if "stays eager" in r.message]
    assert len(told) == 1
    assert "no_such_module" in told[0]
    assert "Graph 0 stays eager" in autoamp.report(model).full()
    assert made[0]._captured is None


@torch.library.custom_op("autoamp_tests::here_only", mutates_args=())
def here_only(x: Tensor) -> Tensor:
    return x * 2


@here_only.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def growing(m: Any, x: Tensor) -> Tensor:
    x.add_(1)
    result: Tensor = m.fc(x)
    return result


@pytest.mark.thorough(but=["a write"])
@pytest.mark.parametrize(
    ("forward", "sizes", "why"),
    [
        (lambda m, x: here_only(m.fc(x)), (4,) * 5, "autoamp_tests"),
        (growing, (4,) * 5, "writes to an argument"),
        (lambda m, x: m.fc(x), (4, 5, 6, 7, 8), "sizes change"),
    ],
    ids=["an op of this process", "a write", "sizes"],
)
def test_a_graph_that_cannot_be_compiled_apart(
    made, forward: Callable[..., Any], sizes: tuple[int, ...], why: str
) -> None:
    model = auto(Of(forward, fc=nn.Linear(32, 32)))
    with torch.no_grad():
        for size in sizes:
            model(torch.randn(size, 32))
        graph = made[-1]
        if graph._compilation is not None:
            wait(graph)
            model(torch.randn(sizes[-1], 32))
    assert why in graph.state


def test_a_backward_that_is_differentiated_again_keeps_the_graph_eager(made) -> None:
    model, x = auto(small()), torch.randn(4, 32, requires_grad=True)
    for _ in range(6):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert made[0].state == "eager"
    assert "create_graph=True" in autoamp.report(model).full()


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_once")
def test_models_that_are_alike_share_the_code_and_have_steps_of_their_own(made) -> None:
    models = [auto(small(), precision="fp16") for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    x = torch.randn(8, 32)  # as in `Training`, whose job is done

    def states() -> list[str]:
        found = [json.loads(autoamp.report(m).to_json())["graphs"] for m in models]
        return [str(graph["background"]) for (graph,) in found]

    for _ in range(3):
        for model in models:
            model(x).mean().backward()
    (graph,) = made
    wait(graph)
    for _ in range(2):
        models[0](x).mean().backward()
        optimizers[0].step()
    models[1](x).mean().backward()
    assert states() == ["compiled", "compiling"]
    optimizers[1].step()
    models[1](x).mean().backward()
    assert states() == ["compiled", "compiled"]


@pytest.mark.usefixtures("compiled_once")
def test_threads_start_a_graph_once(made, monkeypatch) -> None:
    started: list[int] = []
    begin = compat.Compilation.__init__
    monkeypatch.setattr(
        compat.Compilation,
        "__init__",
        lambda self, job: (started.append(1), begin(self, job))[1],
    )
    model, x = auto(small().eval()), torch.randn(4, 32)
    with torch.no_grad():
        wanted = model(x)
    results: list[Tensor] = []
    count = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(count)  # each thread has its own; Dynamo guards it
        with torch.no_grad():
            results.extend(model(x) for _ in range(20))

    for _ in range(2):
        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads]
        [t.join(LIMIT) for t in threads]
        for each in made:
            if each._compilation is not None:
                wait(each)
    assert len(started) == 1
    assert [each.state for each in made] == ["compiled"]
    report = autoamp.report(model)
    assert report.skipped == []
    assert (report.coverage.calls, report.coverage.calls_aside) == (121, 0)
    assert len(results) == 120
    for each in results:
        torch.testing.assert_close(each, wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("compiled_once")
def test_after_an_interrupt_a_later_call_takes_the_code(made, monkeypatch) -> None:
    model, x = auto(small().eval()), torch.randn(4, 32)
    compile_ = compat.compile_like_there

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with torch.no_grad():
        for _ in range(3):
            model(x)
        wait(made[0])
        monkeypatch.setattr(compat, "compile_like_there", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert made[0].state == "compiling"
        monkeypatch.setattr(compat, "compile_like_there", compile_)
        model(x)
    assert made[0].state == "compiled"


def test_a_process_that_cannot_be_started_leaves_no_file(
    made, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    model = auto(small().eval())
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, 32))
    assert "no-python" in made[0].state
    assert not list(tmp_path.glob("autoamp-*"))


def test_a_freed_model_ends_its_compilation(made) -> None:
    model = auto(small())
    for _ in range(3):
        model(torch.randn(4, 32))
    process, folder = compiling(made[0])._process, compiling(made[0])._folder
    assert folder.exists()
    made.clear()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert process.poll() is not None
    assert not folder.exists()


def test_a_reverted_model_runs_its_own_code(made) -> None:
    model, x = auto(small()), torch.randn(4, 32)
    wanted = small()(x)
    for _ in range(3):
        model(x)
    assert made[0].state == "compiling"
    autoamp.revert(model)
    assert torch.equal(model(x), wanted)


@pytest.mark.usefixtures("compiled_once")
def test_random_numbers_are_those_of_eager(made) -> None:
    """Neither the start nor the exchange moves the generator."""
    model, x = auto(small().eval()), torch.randn(4, 32)
    torch.manual_seed(3)
    wanted = torch.rand(7)
    torch.manual_seed(3)
    with torch.no_grad():
        found = []
        for call in range(7):
            model(x)
            found.append(torch.rand(1))
            if call == 4:
                wait(made[0])
    assert made[0].state == "compiled"
    assert torch.equal(torch.cat(found), wanted)


def test_all_runs_start_at_the_same_call() -> None:
    """The count comes from predictions: a graph of more work is compiled earlier."""
    torch._dynamo.reset()
    counts = []
    for width in (64, 64, 1024):
        model = autoamp.convert(nn.Linear(width, width), **BF16)
        model(torch.randn(64, width))
        engine = model.__dict__["_autoamp"].engine
        (graph,) = engine.record.graphs
        counts.append(background.calls_until(graph.prepared))
    assert counts[0] == counts[1]
    assert counts[0] > 4 * counts[2]
    assert counts[2] >= background.LEAST_CALLS


_EXITS = """
import autoamp, torch
from autoamp.capture import background
background.LEAST_CALLS, background.SECONDS_A_NODE = 1, 0.0
model = autoamp.convert(
    torch.nn.Linear(8, 8), precision="bf16", do_no_harm=False, backend="auto"
)
begin = background.compat.Compilation.__init__
def noted(self, job):
    begin(self, job)
    print(self._process.pid, self._folder, flush=True)
background.compat.Compilation.__init__ = noted
with torch.no_grad():
    for _ in range(3):
        model(torch.randn(4, 8))
END
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["pass", "import os; os._exit(0)"])
def test_a_process_that_exits_takes_its_compilation_along(end: str) -> None:
    """Also where no Python code runs at the exit."""
    ran = run_script(_EXITS.replace("END", end))
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    pid = int(ran.stdout.split()[0])
    until = time.monotonic() + LIMIT
    while _runs(pid):
        assert time.monotonic() < until, "the compilation goes on"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split()[2] != "Z"


def test_a_copy_of_the_graph_is_the_graph() -> None:
    """What the other process gets has the names and the inputs of the graph."""
    x = torch.randn(3, 4).t()
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    named = graph.create_node(
        "call_function", torch.ops.aten.relu.default, (given,), name="a_name"
    )
    graph.output((named, None))
    gm = torch.fx.GraphModule({}, graph)
    found, inputs = load_graph(dump_graph(gm, [x]))
    assert [n.name for n in found.graph.nodes] == [n.name for n in gm.graph.nodes]
    assert found.code == gm.code
    (fake,) = inputs
    assert (fake.shape, fake.stride()) == (x.shape, x.stride())
