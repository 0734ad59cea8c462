"""At which call a model is captured in the automatic mode, and its cost until then."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import autoamp
from autoamp.auto import heat as auto_heat
from autoamp.auto import work as auto_work
from autoamp.auto.cold import ColdLine
from autoamp.auto.heat import HOT, Heat
from tests.processes import run_script
from tests.says import says
from tests.small_models import BF16

pytestmark = pytest.mark.usefixtures("nothing_asked_for", "off_again")

REPO = Path(__file__).resolve().parents[2]
CALL = nn.Module.__call__


def hot_at(heat: Heat, module: nn.Module, x: Any, most: int = 100) -> int:
    """At which call the module is hot; 0 where it is not at any of the first `most`."""
    for number in range(1, most + 1):
        if heat.call(CALL, module, (x,), {}) is HOT:
            return number
    return 0


def worth(monkeypatch, capture: float, module: float = 0.0, lent: float = 0) -> None:
    """Sets the predicted seconds of a capture, and those lent to modules that train."""
    monkeypatch.setattr(Heat, "lent", lent)
    monkeypatch.setattr(auto_heat, "LEAST", {True: 0.0, False: 0.0})
    monkeypatch.setattr(auto_heat, "_IMPORT", 0.0)
    monkeypatch.setattr(auto_heat, "_CAPTURE", capture)
    monkeypatch.setattr(auto_heat, "_CAPTURED_MODULE", module)


def large() -> tuple[nn.Module, Tensor]:
    """A layer whose call is predicted to take 0.68 s, on meta so that it takes none."""
    return nn.Linear(4096, 4096, device="meta"), torch.empty(2048, 4096, device="meta")


# -- the rule --------------------------------------------------------------------------


def multiplied(net: nn.Module, *args: Any) -> float:
    """What the flops of a call are counted as, divided by what they are.

    torch counts the products of most layers. In a recurrent layer each matrix
    multiplies each row of the input.
    """
    work = auto_work.Work()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return auto_work.passed_on(CALL, self, args, kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.Module, "__call__", call)
        patch.setattr(auto_work.INSIDE, "work", work)
        net(*args)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.train()(*args)  # no fused kernel, of which torch counts nothing
    scores = sum(
        count
        for op, count in counter.get_flop_counts()["Global"].items()
        if "bmm" in str(op) or "attention" in str(op)
    )
    return work.flops / (counter.get_total_flops() - scores)


SEQUENCE = torch.ones(8, 16, 16)
COUNTED: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "linear": (lambda: nn.Linear(16, 24), (SEQUENCE,)),
    "image": (lambda: nn.Conv2d(16, 24, 3), (torch.ones(2, 16, 9, 9),)),
    "attention": (lambda: nn.MultiheadAttention(16, 2), (SEQUENCE,) * 3),
    "encoder evaluated": (
        lambda: nn.TransformerEncoderLayer(16, 2, 48, batch_first=True).eval(),
        (SEQUENCE,),
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 48))),
        (SEQUENCE,),
    ),
    "table": (
        lambda: nn.Sequential(nn.Embedding(9, 16), nn.LayerNorm(16), nn.Linear(16, 9)),
        (torch.ones(8, 16, dtype=torch.long),),
    ),
}


@pytest.mark.parametrize("layer", COUNTED)
def test_products_are_of_the_order_that_torch_counts(layer: str) -> None:
    """Also weights given to a fused kernel, and weights that are computed."""
    made, args = COUNTED[layer]
    assert 0.5 <= multiplied(made(), *args) <= 2


def test_a_recurrent_layer_multiplies_all_its_gates() -> None:
    work, net = auto_work.Work(), nn.LSTM(16, 24)
    work.note(net, net(SEQUENCE))
    assert 0.5 <= work.flops / (2 * 8 * 16 * 4 * 24 * (16 + 24)) <= 2


@torch.no_grad()
@pytest.mark.parametrize(("capture", "call"), [(0.5, 2), (1.0, 3), (2.0, 4)])
def test_a_model_is_hot_when_its_calls_have_come_to_a_capture(
    monkeypatch, capture: float, call: int
) -> None:
    worth(monkeypatch, capture)
    monkeypatch.setitem(auto_heat._FLOPS, "meta", 1e11)
    model, x = large()
    assert hot_at(Heat(), model.eval(), x) == call


@torch.no_grad()
def test_a_call_with_hardly_any_work_counts_for_its_20_us(monkeypatch) -> None:
    worth(monkeypatch, capture=1e-3)  # fifty calls
    model = nn.Linear(2, 2).eval()
    found = hot_at(Heat(), model, torch.zeros(1, 2))
    assert 45 <= found <= 51
    assert hot_at(Heat(), copy.deepcopy(model), torch.zeros(1, 2)) == found


@torch.no_grad()
def test_each_mode_is_counted_by_itself(monkeypatch) -> None:
    worth(monkeypatch, capture=1e-4, lent=1.0)
    heat, model, x = Heat(), nn.Linear(2, 2), torch.zeros(1, 2)
    first = hot_at(heat, model.eval(), x)
    assert first > 2
    with torch.enable_grad():
        assert heat.call(CALL, model, (x,), {}) is not HOT
    assert heat.call(CALL, model, (x,), {}) is HOT


def test_modules_inside_are_counted_in_the_call_around_them(monkeypatch) -> None:
    """No module is met that a module calls, and a loss counts for nothing."""
    autoamp.enable()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(1, 4)
    nn.CrossEntropyLoss()(model(x), torch.tensor([1]))
    mode: Any = sys.modules["autoamp.auto.switch"]._mode
    met = mode.heat.nearest()
    assert met.module() is model
    assert met.seconds > 3 * 3 * auto_heat._CALL  # three modules, trained


@pytest.mark.parametrize("compiled", ["wrapped", "in place"])
def test_what_the_user_compiles_is_hot_at_once(compiled: str) -> None:
    model: Any = nn.Linear(4, 4)
    if compiled == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    assert hot_at(Heat(), model, torch.zeros(1, 4)) == 1


def test_several_ranks_are_hot_at_once(monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert hot_at(Heat(), nn.Linear(4, 4), torch.zeros(1, 4)) == 1


# -- a training step is wholly fp32 or wholly mixed ------------------------------------


@pytest.mark.parametrize(("capture", "to_none"), [(1e-5, True), (1e-4, False)])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_trained_model_is_hot_where_a_step_begins(
    monkeypatch, micro_batches: int, to_none: bool, capture: float
) -> None:
    worth(monkeypatch, capture=capture)
    heat, model, x = Heat(), nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(300):
        result = heat.call(CALL, model, (x,), {})
        if result is HOT:
            break
        result.sum().backward()
        if number % micro_batches == micro_batches - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert number
    assert number % micro_batches == 0


def train(heat: Heat, model: nn.Module, x: Tensor) -> int:
    """At which step the module is hot, of at most 9; 0 where it is at none."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(1, 10):
        optimizer.zero_grad()
        result = heat.call(CALL, model, (x,), {})
        if result is HOT:
            return number
        result.sum().backward()
        optimizer.step()
    return 0


def test_a_module_that_trains_is_hot_at_its_second_step(monkeypatch) -> None:
    """Until captures have taken what a program is lent; evaluation is lent nothing."""
    worth(monkeypatch, capture=1.0, lent=2.5)
    heat, x = Heat(), torch.ones(1, 2)
    nets = [nn.Linear(2, 2) for _ in range(4)]
    assert not hot_at(heat, nets[0].eval(), x, 4)
    assert [train(heat, net.train(), x) for net in nets] == [2, 2, 0, 0]
    with torch.no_grad():
        assert not hot_at(heat, nets[0].eval(), x)


def test_a_module_whose_calls_are_short_is_never_hot(monkeypatch) -> None:
    worth(monkeypatch, capture=1e-5, lent=1.0)
    monkeypatch.setattr(auto_heat, "LEAST", {True: 1e-3, False: 1e-5})
    heat, model, x = Heat(), nn.Linear(2, 2), torch.ones(1, 2)
    assert not train(heat, model, x)
    with torch.no_grad():
        assert hot_at(heat, model.eval(), x)


def test_calls_that_have_come_to_a_capture_are_lent_nothing(monkeypatch) -> None:
    monkeypatch.setitem(auto_heat._FLOPS, "cpu", 1e3)
    worth(monkeypatch, capture=1e-3, lent=1e-4)
    heat, x = Heat(), torch.ones(1, 2)
    assert [train(heat, nn.Linear(2, 2), x) for _ in range(3)] == [2, 2, 2]


def test_a_model_that_nobody_trains_becomes_hot_with_gradients_on(monkeypatch) -> None:
    worth(monkeypatch, capture=1e-5)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert hot_at(Heat(), model.eval(), x) > 3
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert hot_at(Heat(), model, x)


TRAINS = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
print(repr(loss.item()), "autoamp.auto.switch" in sys.modules)
"""


def test_a_small_script_that_evaluates_imports_nothing_and_is_told_so() -> None:
    script = TRAINS.replace("loss.backward()", "").replace("optimizer.step()", "")
    off = run_script(script, AUTOAMP_ENABLE="0")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    cold = subprocess.run(  # of a Python that has imported nothing
        [sys.executable, "-c", script],
        env={**kept, "PYTHONPATH": str(REPO), "AUTOAMP_ENABLE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert cold.stdout.split() == [off.stdout.split()[0], "False"]
    (line,) = cold.stderr.splitlines()
    says(line, "Sequential ran as it is", option="AUTOAMP_HOT=0")
    assert not off.stderr


@pytest.mark.parametrize("width", [8, 4096])
def test_a_script_that_trains_is_converted_unless_its_calls_are_short(
    width: int,
) -> None:
    script = TRAINS.replace("8, 8", f"8, {width}").replace("8, 2", f"{width}, 2")
    script = script.replace("ones(4, 8)", "ones(2048, 8)").replace(
        "range(20)", "range(3)"
    )
    on = run_script(script, AUTOAMP_ENABLE="1", AUTOAMP_PRECISION="bf16")
    assert on.returncode == 0, on.stderr
    if width == 8:
        says(on.stderr, "Sequential ran as it is", "ms gains nothing")
    else:
        says(on.stderr, "Sequential")
        assert "ran as it is" not in on.stderr


# -- a model that is traced while it is cold -------------------------------------------


@pytest.fixture
def cold(monkeypatch) -> nn.Module:
    """A model in the automatic mode that is counted at its next call."""
    autoamp.enable()
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def test_a_scripted_trace_holds_no_count(cold: nn.Module, recwarn) -> None:
    traced = torch.jit.trace(cold, torch.ones(3, 4))
    assert "numel" not in str(traced.inlined_graph)
    assert torch.equal(traced(torch.ones(5, 4)), cold(torch.ones(5, 4)))
    assert not [w for w in recwarn if "Tracer" in w.category.__name__]


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_keeps_its_dynamic_sizes(cold: nn.Module, strict: bool) -> None:
    rows = {"input": {0: torch.export.Dim("rows")}}
    made = torch.export.export(
        cold, (torch.ones(3, 4),), dynamic_shapes=rows, strict=strict
    )
    x = torch.randn(7, 4)
    assert torch.equal(made.module()(x), cold(x))


# -- the line at the end of a program in which nothing was hot -------------------------


class Trained(nn.Linear): ...


class Mean(nn.Linear): ...


def steps(heat: Heat, model: nn.Module, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(count):
        optimizer.zero_grad()
        heat.call(CALL, model, (torch.ones(3, 4),), {}).sum().backward()
        optimizer.step()


def looked_at(heat: Heat, model: nn.Module, count: int, *, grad: bool = False) -> None:
    with torch.set_grad_enabled(grad):
        for _ in range(count):
            heat.call(CALL, model, (torch.ones(30, 4),), {})


def a_mean_of_weights(heat: Heat, model: nn.Linear) -> None:
    """A teacher in training mode, whose weights follow the model's."""
    mean = Mean(4, 4)
    for _ in range(9):
        looked_at(heat, mean, 1)
        with torch.no_grad():
            mean.weight.lerp_(model.weight, 0.5)


def a_reloaded_copy(heat: Heat, model: nn.Module) -> None:
    copied = Mean(4, 4)
    copied.load_state_dict(model.state_dict())
    looked_at(heat, copied.eval(), 50)


def many_others(heat: Heat, model: nn.Module) -> None:
    others = [Mean(4, 4) for _ in range(5)]
    for each in others:
        looked_at(heat, each, 20, grad=True)


def a_weight_of_its_own(heat: Heat, model: Any) -> None:
    parametrizations.weight_norm(model)
    for _ in range(9):
        heat.call(CALL, model.parametrizations.weight, (), {})


@pytest.mark.parametrize(
    "beside", [a_mean_of_weights, a_reloaded_copy, many_others, a_weight_of_its_own]
)
@pytest.mark.parametrize("order", ["before", "after", "dead"])
def test_the_line_at_exit_names_the_model_that_trained(
    beside: Callable[[Heat, Any], None], order: str, monkeypatch, capfd
) -> None:
    worth(monkeypatch, capture=1.0)
    heat, model = Heat(), Trained(4, 4)
    if order == "before" and beside is not a_weight_of_its_own:
        beside(heat, Trained(4, 4))
    steps(heat, model, 5)
    nearest = heat.nearest()
    assert nearest is not None
    other = copy.deepcopy(model)
    if order == "dead":
        del model
    if order != "before":
        beside(heat, other)
    del other
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("autoamp"), "level", logging.INFO)
    ColdLine(heat, "AUTOAMP_HOT=0").end()
    (line,) = capfd.readouterr().err.splitlines()
    says(line, "Trained ran as it is", f"{nearest.spent:.2g} s")
    assert "fp32" not in line, "a half model runs in its own dtype"


class Seen(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def seen(monkeypatch, capfd, level: int | None, speak: Callable[[], None]) -> list[str]:
    """The lines a script sees whose root has a handler of a level, or has none."""
    handler = Seen(logging.NOTSET if level is None else level)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [] if level is None else [handler])
    monkeypatch.setattr(root, "level", level or logging.WARNING)
    speak()
    return handler.lines + capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("by", ["handler", "logger"])
@pytest.mark.parametrize("level", [None, "INFO", "WARNING", "CRITICAL"])
def test_the_line_at_exit_is_seen_once_whatever_is_logged(
    level: str | None, by: str, monkeypatch, capfd
) -> None:
    worth(monkeypatch, capture=1.0)
    heat, number = Heat(), None if level is None else getattr(logging, level)
    looked_at(heat, Mean(4, 4), 3)
    speak = ColdLine(heat, "AUTOAMP_HOT=0").end
    shown = logging.NOTSET if by == "logger" and level else number
    monkeypatch.setattr(logging.getLogger("autoamp"), "level", logging.NOTSET)
    (line,) = seen(monkeypatch, capfd, shown, speak)
    says(line, "Mean ran as it is")


def test_a_captured_model_hides_none_that_trains(monkeypatch, capfd) -> None:
    worth(monkeypatch, capture=1.0)
    heat, teacher, student = Heat(), Mean(4, 4).eval(), Trained(4, 4)
    steps(heat, student, 5)
    worth(monkeypatch, capture=1e-5)
    teacher.requires_grad_(False)
    assert hot_at(heat, teacher, torch.ones(3, 4), 999)
    speak = ColdLine(heat, "AUTOAMP_HOT=0").end
    (line,) = seen(monkeypatch, capfd, None, speak)
    says(line, "Trained ran as it is")


def test_a_captured_model_that_is_evaluated_is_not_called_cold(
    monkeypatch, capfd
) -> None:
    worth(monkeypatch, capture=1.0)
    heat, model = Heat(), Trained(4, 4)
    looked_at(heat, Mean(4, 4), 3)
    steps(heat, model, 3)
    worth(monkeypatch, capture=1e-5)
    assert hot_at(heat, model, torch.ones(3, 4), 999)
    worth(monkeypatch, capture=1.0)
    looked_at(heat, model.eval(), 3)
    speak = ColdLine(heat, "AUTOAMP_HOT=0").end
    assert not seen(monkeypatch, capfd, None, speak)


NOTEBOOK = """
import sys, types, torch
from torch import nn
class Trained(nn.Linear): ...
class Frozen(nn.Linear): ...
class Other(nn.Linear): ...
class Late(nn.Linear): ...
cells = []
class Events:
    def register(self, event, function):
        assert event == "post_run_cell"
        cells.append(function)
    def unregister(self, event, function):
        cells.remove(function)
shell = types.SimpleNamespace(events=Events())
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
x, trained, frozen, other = torch.ones(3, 4), Trained(4, 4), Frozen(4, 4), Other(4, 4)
def trains():
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for _ in range(4):
        frozen(x), trained(x).sum().backward()
        optimizer.step()
def is_evaluated():
    for _ in range(9):
        trained.eval()(x)
def ends():
    Late(4, 4)(x)
    autoamp.disable()
def cell(*actions):
    for each in actions:
        each()
    for each in [*cells]:
        each("a result")
    print("a cell ends", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["variable", "enable"])
def test_in_a_notebook_the_line_comes_after_the_cell_and_never_again(how: str) -> None:
    """The process of a notebook does not exit while anybody looks at it."""
    lent = "import autoamp.auto.heat\nautoamp.auto.heat.Heat.lent = 0\n"
    begins = {"variable": lent, "enable": f"{lent}autoamp.enable()"}
    cells = """
cell()
cell(trains)
cell(is_evaluated)
cell(lambda: other(x))
cell(ends)
assert not cells
"""
    on = {"AUTOAMP_ENABLE": str(int(how == "variable"))}
    done = run_script(NOTEBOOK + begins[how] + cells, **on)
    assert done.returncode == 0, done.stderr
    first, second, third, fourth, fifth, last = done.stderr.split("a cell ends\n")
    assert not first + third + last
    advice = {"variable": "AUTOAMP_HOT=0", "enable": "hot=False"}[how]
    says(second, "Trained ran as it is", option=advice)
    says(fourth, "Other ran as it is")
    says(fifth, "Late ran as it is")
    assert len(done.stderr.splitlines()) == 8


@pytest.mark.parametrize("identity", [(), (1,), (2,), (1, 2)])
def test_the_first_of_several_workers_says_a_line(
    identity: tuple[int, ...], monkeypatch, capfd
) -> None:
    worth(monkeypatch, capture=1.0)
    heat = Heat()
    looked_at(heat, Mean(4, 4), 3)
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_identity", identity)
    speak = ColdLine(heat, "AUTOAMP_HOT=0").end
    assert len(seen(monkeypatch, capfd, None, speak)) == (2 not in identity)


def test_nothing_is_said_where_no_call_has_ended(capfd) -> None:
    heat = Heat()
    with pytest.raises(RuntimeError):
        heat.call(CALL, Trained(4, 4), (torch.ones(3, 5),), {})
    ColdLine(heat, "AUTOAMP_HOT=0").end()
    assert not capfd.readouterr().err


def test_weights_that_were_made_in_inference_mode_are_trained(monkeypatch) -> None:
    """They count no versions, by which the start of a step is found."""
    worth(monkeypatch, capture=1e-5)
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    assert hot_at(Heat(), model, torch.ones(3, 4))


def test_what_the_script_has_converted_is_not_called_cold(capfd) -> None:
    heat, model = Heat(), autoamp.convert(nn.Linear(4, 4), **BF16)
    assert hot_at(heat, model, torch.ones(3, 4)) == 1
    ColdLine(heat, "AUTOAMP_HOT=0").end()
    assert not capfd.readouterr().err
