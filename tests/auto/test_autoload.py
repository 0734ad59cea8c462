"""The entry point torch calls, and `enable` and `disable`: what they do, and undo."""

from __future__ import annotations

import code
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import autoamp
import autoamp_autoload
from autoamp.runtime import compile_backend
from autoamp.runtime import convert as convert_module
from autoamp.training import attach
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, WIDTH, Of, mlp

VARIABLES = {
    "AUTOAMP_PRECISION": "bf16",
    "AUTOAMP_DO_NO_HARM": "0",
    "AUTOAMP_CALIBRATE": "0",
}
CALL, COMPILE = nn.Module.__call__, torch.compile
PACKAGE = logging.getLogger("autoamp")


def global_state() -> dict[str, Any]:
    """All that is not an object of the script's own."""
    return {
        "call": nn.Module.__call__,
        "compile": torch.compile,
        "level": PACKAGE.level,
        "handlers": [*PACKAGE.handlers],
        "pre": dict(torch_optimizer._global_optimizer_pre_hooks),
        "post": dict(torch_optimizer._global_optimizer_post_hooks),
    }


@pytest.fixture(autouse=True)
def all_off_again(nothing_asked_for: None, off_again: None) -> Iterator[None]:
    # What other tests compiled listens to optimizers for as long as it lives.
    compile_backend._BACKENDS.clear()
    attach._scalings.clear()
    while attach._hook:
        attach._hook.pop().remove()
    level = PACKAGE.level
    yield
    autoamp.disable()
    # Whatever a test leaves armed or patched over.
    nn.Module.__call__, torch.compile = CALL, COMPILE
    PACKAGE.setLevel(level)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, WIDTH)


def armed(monkeypatch, **variables: str) -> None:
    for name, value in {**VARIABLES, "AUTOAMP_ENABLE": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    autoamp_autoload.autoload()


# -- off -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", " ", "0", "false", "off", "OFF", "False "])
def test_off(value: str | None, monkeypatch, caplog) -> None:
    if value is not None:
        monkeypatch.setenv("AUTOAMP_ENABLE", value)
    before = global_state()
    autoamp_autoload.autoload()
    assert global_state() == before
    assert warned(caplog) == []


@pytest.mark.parametrize("name", ["AUTOAMP", "AUTOAMP_ENABLED", "AUTOAMP_PRECISION"])
def test_a_variable_that_turns_nothing_on_is_told_once_a_program(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOAMP_CALIBRATE", "0")  # `autoamp.convert` reads it
    before = global_state()
    autoamp_autoload.autoload()
    assert warned(caplog) == []
    monkeypatch.setenv(name, "1")
    autoamp_autoload.autoload()
    (told,) = warned(caplog)
    says(told, f" {name}:", option="AUTOAMP_ENABLE=1")
    assert global_state() == before
    # A worker of the program, and a user who has switched the mode off.
    with monkeypatch.context() as worker:
        worker.setattr(multiprocessing, "parent_process", object)
        autoamp_autoload.autoload()
    monkeypatch.setenv("AUTOAMP_ENABLE", "0")
    autoamp_autoload.autoload()
    assert warned(caplog) == [told]


IMPORTED = """
import sys, torch
heavy = "autoamp.auto.switch networkx rich click torch._dynamo".split()
found = [name for name in heavy if name in sys.modules]
print(found, "autoamp_autoload" in sys.modules)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
print("autoamp.auto.switch" in sys.modules, torch.nn.Module.__call__.__module__)
"""


@pytest.mark.parametrize(
    ("variables", "printed", "is_on"),
    [
        ({"AUTOAMP_ENABLE": "1"}, "[] True\nTrue autoamp.auto.switch\n", True),
        pytest.param(
            {"AUTOAMP_ENABLE": "off"},
            "[] True\nFalse torch.nn.modules.module\n",
            False,
            marks=pytest.mark.slow,  # `test_off` is the quick one
        ),
        pytest.param(
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "AUTOAMP_ENABLE": "1"},
            "[] False\nFalse torch.nn.modules.module\n",
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["on", "off", "torch's own switch"],
)
def test_nothing_heavy_is_imported_until_a_module_is_called(
    variables: dict[str, str], printed: str, is_on: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTED],
        env={**os.environ, **VARIABLES, **variables},
        cwd="/",  # a checkout's own package would go before an installed one
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == printed
    converted = "Sequential is converted to bf16: 2 of 2 float ops low"
    assert converted in done.stderr if is_on else not done.stderr


# -- on --------------------------------------------------------------------------------


def test_first_call_starts_it(monkeypatch, x: Tensor) -> None:
    model = mlp()
    exact = model(x)
    armed(monkeypatch)
    found = model(x)
    assert autoamp.is_converted(model)
    assert not torch.equal(found, exact)
    assert autoamp.report(model).runs == 1
    autoamp.disable()
    assert (nn.Module.__call__, torch.compile) == (CALL, COMPILE)
    assert torch.equal(model(x), exact)


def broken_package(code: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """A package of ours that cannot be imported."""

    def make(patch: pytest.MonkeyPatch, folder: Path) -> None:
        (folder / "autoamp").mkdir()
        (folder / "autoamp" / "__init__.py").write_text(code)
        for name in [n for n in sys.modules if n.partition(".")[0] == "autoamp"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(folder)

    return make


def variable(name: str, value: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    return lambda patch, _: patch.setenv(name, value)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], list[str]]] = {
    **{
        f"AUTOAMP_ENABLE={value[:9]!a}": (
            variable("AUTOAMP_ENABLE", value),
            ["AUTOAMP_ENABLE=", "1, true, on", "0, false, off"],
        )
        for value in ("yes", "2", "-", "\x1b[31m\n", "オン", "x" * 10**5)
    },
    **{
        name: (
            variable(name, "/proc/x\n\x1b[31m"),
            ["off", "fp32", f"{name}='/proc/x\\n\\x1b[31m'"],
        )
        for name in ("AUTOAMP_RULES", "AUTOAMP_REPORT_DIR")
    },
    **{
        code: (broken_package(code), ["off", "fp32", error])
        for code, error in (
            ("import autoamp.missing", "ModuleNotFoundError"),
            ("def :", "SyntaxError"),
            ("1 / 0", "ZeroDivisionError: division by zero"),
        )
    },
    "torch without compile": (
        lambda patch, _: patch.delattr(torch, "compile"),
        ["AttributeError", "compile"],
    ),
}
"""What keeps the automatic mode from starting, and what the warning names."""


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_start_is_one_warning_and_the_script_runs_in_fp32(
    name: str, monkeypatch, tmp_path: Path, caplog, x: Tensor
) -> None:
    breaks, named = FAULTS[name]
    model, hooks = mlp(), global_state()["pre"]
    exact = model(x)
    for key, value in {**VARIABLES, "AUTOAMP_ENABLE": "1"}.items():
        monkeypatch.setenv(key, value)
    with monkeypatch.context() as patch:
        breaks(patch, tmp_path)
        autoamp_autoload.autoload()
        for _ in range(2):
            assert torch.equal(model(x), exact)
        if hasattr(torch, "compile"):
            assert torch.compile(mlp(), backend="eager")(x).shape == (3, 4)
            assert torch.compile is COMPILE
        assert nn.Module.__call__ is CALL
    assert global_state()["pre"] == hooks, "steps are still looked at"
    (line,) = warned(caplog)
    says(line, *named)
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.parametrize("precision", ["bf16", "nonsense"])
def test_closed_stderr_stops_nothing(precision: str, monkeypatch, x: Tensor) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    model = mlp()
    armed(monkeypatch, AUTOAMP_PRECISION=precision)
    model(x)
    assert autoamp.is_converted(model) is (precision == "bf16")


# -- whoever patches what we patch -----------------------------------------------------


def test_patched_over_while_armed(monkeypatch, x: Tensor) -> None:
    armed(monkeypatch)
    seen: list[str] = []
    call, compile_ = nn.Module.__call__, torch.compile

    def their_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append("call")
        return call(self, *args, **kwargs)

    def their_compile(*args: Any, **kwargs: Any) -> Any:
        seen.append("compile")
        return compile_(*args, **kwargs)

    nn.Module.__call__ = their_call
    torch.compile = their_compile
    weight = torch.randn(WIDTH, WIDTH)
    function = torch.compile(lambda x: x @ weight, backend="eager")
    assert seen == ["compile"]
    low = (x.bfloat16() @ weight.bfloat16()).float()
    assert torch.equal(function(x), low)
    model = mlp()
    model(x)
    assert seen.count("call") == 1 + 3
    assert autoamp.is_converted(model)
    assert (nn.Module.__call__, torch.compile) == (their_call, their_compile)
    autoamp.disable()
    assert (nn.Module.__call__, torch.compile) == (their_call, their_compile)
    assert torch.equal(function(x), x @ weight)
    other = mlp()
    other(x)
    assert not autoamp.is_converted(other)
    assert torch.equal(torch.compile(lambda x: x + 1, backend="eager")(x), x + 1)
    autoamp.enable(**BF16)
    other(x)
    assert autoamp.report(other).runs == 1


def test_disable_before_the_first_call(monkeypatch, x: Tensor) -> None:
    armed(monkeypatch)
    call = nn.Module.__call__
    autoamp.disable()
    model = mlp()
    model(x)
    call(model, x)
    assert not autoamp.is_converted(model)
    assert (nn.Module.__call__, torch.compile) == (CALL, COMPILE)


def test_enable_before_the_first_call_is_what_counts(monkeypatch, x: Tensor) -> None:
    armed(monkeypatch)
    autoamp.enable(precision="fp16", do_no_harm=False)
    model = mlp()
    model(x)
    assert autoamp.report(model).graphs
    assert {op.precision for op in autoamp.report(model).ops} >= {"fp16"}


# -- processes and notebooks -----------------------------------------------------------

PROCESSES = """
import sys, torch, torch.multiprocessing as mp, multiprocessing
from torch.utils.data import DataLoader, Dataset

class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * 2

class Data(Dataset):
    def __init__(self): self.change = Scaled()
    def __len__(self): return 6
    def __getitem__(self, i): return self.change(torch.full((4,), float(i)))

def work(queue):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():  # no backward: torch has none in a fork after one
        model(torch.randn(2, 4))
    import autoamp
    queue.put((autoamp.is_converted(model), autoamp.report(model).runs))

def main(method):
    loader = DataLoader(Data(), num_workers=1, multiprocessing_context=method)
    assert sum(batch.sum() for batch in loader) == 2 * 4 * 15
    for library in (multiprocessing, mp)[sys.argv[1:] == ["fork", "before"] :]:
        context = library.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print(*queue.get(timeout=40))
        child.join()
        assert child.exitcode == 0

if __name__ == "__main__":
    if sys.argv[2] == "after":
        work(multiprocessing.SimpleQueue())
    main(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("method", "when"),
    [
        ("fork", "before"),
        pytest.param("fork", "after", marks=pytest.mark.slow),
        pytest.param("spawn", "before", marks=pytest.mark.slow),
    ],
)
def test_processes(method: str, when: str, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    variables = {**VARIABLES, "AUTOAMP_ENABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), method, when],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["True 1"] * (1 if (method, when) == ("fork", "before") else 2)
    assert "warning" not in done.stderr.lower()


def test_cells_of_a_notebook(monkeypatch) -> None:
    armed(monkeypatch)
    shell = code.InteractiveInterpreter({"__name__": "__main__"})
    cells = (
        "import torch; from torch import nn",
        "class Net(nn.Linear):\n  def forward(self, x): return super().forward(x)",
        "net = Net(4, 4); first = net(torch.randn(2, 4))",
        "torch.optim.SGD(net.parameters(), 0.1).step()",
        "first.sum().backward(); import autoamp; report = autoamp.report(net)",
    )
    for cell in cells:
        shell.runsource(cell, "<cell>", "exec")
    assert shell.locals["report"].runs == 1


# -- enable and disable ----------------------------------------------------------------


def trained(model: nn.Module, x: Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).sum().backward()
    optimizer.step()
    return optimizer


def test_disable_puts_everything_back(x: Tensor) -> None:
    before = global_state()
    model = mlp()
    contents, keys = dict(model.__dict__), set(model.state_dict())
    autoamp.enable(precision="fp16", do_no_harm=False)
    assert nn.Module.__call__ is not CALL
    optimizer = trained(model, x)
    assert autoamp.is_converted(model)
    assert "step" in vars(optimizer)
    assert global_state()["pre"]
    autoamp.disable()
    autoamp.disable()
    assert global_state() == before
    assert model.__dict__ == contents
    assert set(model.state_dict()) == keys
    assert {"step", "step_was_skipped", "_autoamp"}.isdisjoint(vars(optimizer))
    other = mlp()
    other(x)
    assert not autoamp.is_converted(other)


@pytest.mark.parametrize("end", [autoamp.disable, autoamp.revert])
@pytest.mark.parametrize("outer", [lambda m: m, nn.Sequential])
def test_the_report_of_a_model_that_was_reverted_says_so(
    end: Any, outer: Any, x: Tensor
) -> None:
    """The plugin of a trainer ends the mode, which the script may not know."""
    model = mlp()
    with pytest.raises(autoamp.UnsupportedModelError) as never:
        autoamp.report(outer(model))
    says(str(never.value), "Sequential", option="autoamp.convert")
    autoamp.enable(**BF16)
    model(x)
    assert autoamp.report(model).runs == 1
    end(model) if end is autoamp.revert else end()
    with pytest.raises(autoamp.UnsupportedModelError) as reverted:
        autoamp.report(outer(model))
    says(str(reverted.value), "Sequential", "report before", option="autoamp.disable")


def test_logging_is_put_back(monkeypatch, x: Tensor) -> None:
    before = global_state()
    armed(monkeypatch)
    mlp()(x)
    assert PACKAGE.level == logging.INFO
    assert PACKAGE.handlers == before["handlers"]
    autoamp.disable()
    assert global_state() == before
    PACKAGE.setLevel(logging.ERROR)  # one that somebody set stays
    armed(monkeypatch)
    mlp()(x)
    assert PACKAGE.level == logging.ERROR
    autoamp.disable()
    assert PACKAGE.level == logging.ERROR


@pytest.mark.parametrize("alike", [True, False])
def test_wrappers_made_anew_are_not_captured_without_end(
    alike: bool, x: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    def acts(m: Any, x: Tensor) -> Tensor:
        return m.act(m.inner(x))  # type: ignore[no-any-return]

    autoamp.enable(**BF16)
    inner, captured, found = mlp(), 0, []
    for _ in range(8):
        wrapper = Of(acts, inner=inner)
        wrapper.act = torch.relu if alike else lambda x: x.relu()
        found.append(wrapper(x))
        captured += len(autoamp.report(wrapper).graphs)
    assert captured == (8 if alike else 4)
    assert all(torch.allclose(each, found[0], atol=2**-5) for each in found)
    lines = [line for line in warned(caplog) if "round the same weights" in line]
    assert len(lines) == (not alike)


def test_enable_twice(x: Tensor) -> None:
    model = mlp()
    exact = model(x)
    autoamp.enable(**BF16)
    model(x)
    patched = nn.Module.__call__
    autoamp.enable(keep=["*"], **BF16)
    assert nn.Module.__call__ is patched, "patched over itself"
    assert not autoamp.is_converted(model)
    assert torch.equal(model(x), exact)
    assert autoamp.is_converted(model)
    autoamp.disable()
    assert (nn.Module.__call__, torch.compile) == (CALL, COMPILE)


BAD: list[dict[str, Any]] = [
    {"precison": "bf16"},
    {"precision": "fp8"},
    {"rules": "/proc/x"},
    {"loss_scale": -1},
    {"unlist": (("allow", "mm"),)},
    {"report_dir": "/proc/x"},
    {"report_dir": "~nosuchuser"},
]


@pytest.mark.parametrize("options", BAD, ids=str)
@pytest.mark.parametrize("on", [True, False])
def test_bad_options_change_nothing(options: dict[str, Any], on: bool) -> None:
    if on:
        autoamp.enable(**BF16)
    before, model = global_state(), mlp()
    with pytest.raises(autoamp.AutoampError):
        autoamp.enable(**options)
    assert global_state() == before
    model(torch.randn(3, WIDTH))
    assert autoamp.is_converted(model) is on


@pytest.mark.parametrize("by_environment", [True, False])
def test_first_call_from_many_threads_converts_once(
    by_environment: bool, monkeypatch, x: Tensor
) -> None:
    model, start = mlp(), threading.Barrier(8)
    if by_environment:
        armed(monkeypatch)
    else:
        autoamp.enable(**BF16)
    found: list[Tensor] = []

    def call() -> None:
        start.wait()
        with torch.no_grad():
            found.append(model(x))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = autoamp.report(model)
    assert (len(report.graphs), report.runs) == (1, 8)
    assert all(torch.equal(each, found[0]) for each in found)


# -- what is left alone ----------------------------------------------------------------


class OwnCall(nn.Module):
    """Does something before and after what every module does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def quantised(*layers: Any) -> nn.Module:
    quantise = torch.ao.quantization.quantize_dynamic
    return quantise(mlp(), {*layers}, dtype=torch.qint8)


LEFT: dict[str, Callable[[], nn.Module]] = {
    "loss": nn.LogSoftmax,
    "transforms": lambda: nn.Sequential(nn.Tanh(), nn.Softmax(-1)),
    "fp16": lambda: mlp().half(),
    "bf16": lambda: mlp().bfloat16(),
    "float64": lambda: mlp().double(),
    "scripted": lambda: torch.jit.script(mlp()),
    "quantised": lambda: quantised(nn.Linear),
    "partly quantised": lambda: quantised("0"),
    "lone layer": lambda: nn.Linear(WIDTH, 4),
}


@pytest.mark.filterwarnings("ignore")  # torch's own: what is made here is deprecated
@pytest.mark.parametrize("name", LEFT)
def test_runs_as_it_did(name: str, x: Tensor) -> None:
    model = LEFT[name]()
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = x.to(dtype)
    exact = model(x)
    contents = {k: v for k, v in model.__dict__.items() if k != "forward"}
    autoamp.enable(**BF16)
    for _ in range(2):
        found = model(x)
        assert found.dtype == exact.dtype
        assert torch.equal(found, exact)
    if name != "lone layer":
        assert {k: v for k, v in model.__dict__.items() if k != "forward"} == contents


def test_what_a_loss_without_parameters_calls_is_looked_at(x: Tensor) -> None:
    held = [mlp()]
    autoamp.enable(**BF16)
    Of(lambda m, x: held[0](x).sum())(x).backward()
    assert autoamp.is_converted(held[0])


def test_lazy_modules_are_met_once_they_have_weights(x: Tensor) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 4))
    autoamp.enable(**BF16)
    model(x)
    assert not autoamp.is_converted(model)
    model(x)
    assert autoamp.report(model).runs == 1


def test_a_model_the_user_converted_stays_as_it_is(x: Tensor) -> None:
    model = autoamp.convert(mlp(), precision="bf16", do_no_harm=False, keep=["0"])
    expected = model(x)
    autoamp.enable(**BF16)
    assert torch.equal(model(x), expected)
    assert autoamp.report(model).runs == 2
    autoamp.disable()
    assert autoamp.is_converted(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("known", [True, False])
def test_the_users_own_autocast_is_left_alone(known: bool, x: Tensor) -> None:
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    autoamp.enable(precision="fp16", do_no_harm=False)
    if known:
        model(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert autoamp.is_converted(model) is known
    model(x)
    assert autoamp.is_converted(model)


def test_a_call_of_their_own_is_kept(x: Tensor) -> None:
    model = OwnCall()
    autoamp.enable(**BF16)
    found = model(x)
    assert model.calls == 1
    assert autoamp.report(model).runs == 1
    assert torch.equal(found, model.inner(x) + 1)


# -- what was declined, and what fails -------------------------------------------------


def test_a_model_that_moves_is_looked_at_again(monkeypatch, x: Tensor) -> None:
    pays = False
    asked = convert_module.choose_precision

    def chosen(model: nn.Module, options: Any) -> tuple[torch.dtype | None, str]:
        return asked(model, options) if pays else (None, "it cannot pay here")

    monkeypatch.setattr(convert_module, "choose_precision", chosen)
    autoamp.enable(**BF16)
    model = mlp()
    model(x)
    pays = True
    model(x)
    assert not autoamp.is_converted(model), "asked once for each device"
    model.to("meta")
    model(x.to("meta"))
    model.to_empty(device="cpu")
    model(x)
    assert autoamp.is_converted(model)


def test_whatever_fails_at_a_conversion_is_one_warning(
    monkeypatch, caplog, x: Tensor
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("the bridge is out")

    monkeypatch.setattr("autoamp.auto.mode.convert_model", fail)
    model = mlp()
    exact = model(x)
    autoamp.enable(**BF16)
    for _ in range(3):
        assert torch.equal(model(x), exact)
    (line,) = warned(caplog)
    says(line, "fp32", "ZeroDivisionError: the bridge is out")
    autoamp.enable(**BF16, strict=True)
    with pytest.raises(ZeroDivisionError):
        model(x)
