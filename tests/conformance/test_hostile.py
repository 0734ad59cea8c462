"""Hostile input: variables, command lines, names, rules files and checkpoints.

Whatever they hold, a script runs on, nothing is executed or written elsewhere, and an
error is ours, names what is wrong, and can be shown on a terminal.
"""

from __future__ import annotations

import ast
import copy
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

import autoamp
import autoamp_cli
from autoamp import Rules
from autoamp.auto import environment
from autoamp.passes.rules import parse
from autoamp.training import boundary
from tests.says import says
from tests.training.steps import BF16, differences, mlp, state_of, weights_of


def assert_can_be_shown(said: str, most: int = 4000) -> None:
    assert said.replace("\n", "").isprintable()
    assert len(said) <= most


# -- variables -------------------------------------------------------------------------

VARIABLES = sorted({environment.ENABLE, *environment._VARIABLES})
HOSTILE = [
    "\x1b[31m\nnot an autoamp line",
    "[red]%s{0}$(touch owned);`touch owned`",
    "../../../../etc/shadow",
    "\udcff\udc80",
    "ﬀ\u202e",
    "x" * 50_000,
]
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
model(torch.randn(2, 4)).sum().backward()
print("ran")
"""

# A directory is made where one is asked for.
UNMADE = [name for name in VARIABLES if not name.endswith("_DIR")]
text = st.text(max_size=20) | st.sampled_from(HOSTILE)


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_a_script_runs_on_and_is_told_once(value: str, tmp_path) -> None:
    """Every variable is hostile; the first one read is named."""
    environ = {**dict.fromkeys(UNMADE, value), environment.ENABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | environ,
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=240,
    )
    assert done.stdout == b"ran\n"
    (line,) = done.stderr.decode("utf-8", "backslashreplace").splitlines()
    assert line.startswith("autoamp is off, everything runs in fp32: ")
    assert "AUTOAMP_" in line
    assert_can_be_shown(line, most=5000)
    assert list(tmp_path.iterdir()) == []


# -- the command line ------------------------------------------------------------------


def call(*arguments: str, **environ: str) -> Any:
    return CliRunner(env=environ).invoke(
        autoamp_cli.main, arguments, prog_name="autoamp"
    )


options = st.sampled_from(
    [
        *("--precision", "--rules", "--loss-scale", "--backend", "--allow", "--deny"),
        *("--keep", "--convert-anyway", "--allowlist-remove", "--denylist-remove"),
        *("--strict", "-m", "--", "-", "--nothing", "--report-dir=/proc/x"),
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(options | text, max_size=6))
def test_any_arguments_of_run(monkeypatch, arguments: list[str]) -> None:
    """Nothing is launched but this Python, with the arguments one by one."""
    launched: list[list[str]] = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> Any:
        launched.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    result = call("run", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if result.exit_code:
        assert "Traceback" not in result.output
        assert not launched
    for command in launched:
        assert command[0] == sys.executable
        assert command[-1] == arguments[-1]
        assert set(command[1:]) <= {*arguments, "-m"}


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_env_shows_variables_on_lines_of_their_own(value: str) -> None:
    given_ = {**dict.fromkeys(UNMADE, value), "AUTOAMP_\x1b[31m\nX": ""}
    result = call("env", **given_)
    assert result.exit_code == 0
    _, _, section = result.output.partition("\nenvironment\n")
    lines = section.splitlines()
    assert len(lines) >= len(given_)
    assert all(line.startswith("  ") and line.isprintable() for line in lines)


# -- names -----------------------------------------------------------------------------

NAMES = {
    "rich": "[red]x[/]",
    "link": "[link=file:///etc/passwd]x",
    "html": "<script>alert(1)</script>&\"'",
    "newline": 'a\nb"];\n}',
    "escape": "\x1b[31m\x1b]0;owned\x07",
    "direction": "\u202egnp.exe",
    "up": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "backslash": "\\..\\x",
    "null": "a\x00b",
    "surrogate": "\ud800",
    "percent": "%s%n{0.__class__}",
    "long": "x" * 500,
}
"""Names of modules and of classes."""


def hostile(name: str, **more: Any) -> nn.Module:
    """A converted model that has `name` for a class, a child and a child's class."""
    # A class cannot be called by a null or half a character.
    of_class = name.replace("\x00", "0").encode("utf-8", "replace").decode()
    layer = type(of_class, (nn.Linear,), {})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._modules[name] = layer(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self._modules[name](x).exp()

    Model.__name__ = Model.__qualname__ = of_class
    return autoamp.convert(Model(), **{**BF16, **more})


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_shown_as_they_are(kind: str, caplog, tmp_path) -> None:
    """On one line each, in reports, errors and what is logged."""

    def fails(gm: Any, inputs: Any) -> Any:
        raise ValueError(f"{NAMES[kind]}\x1b[31m[red]first\nsecond\u202e")

    caplog.set_level(logging.DEBUG, "autoamp")
    failed = hostile(NAMES[kind], strict=False, backend=fails)
    failed(torch.randn(2, 8))
    model = hostile(NAMES[kind], strict=False)
    model(torch.randn(2, 8)).sum().backward()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        model(torch.randn(2, 8))  # past the graphs: what was not converted, and why
    report = autoamp.report(model)
    assert report.skipped
    assert report.runs == 1

    dot = report.to_dot()
    texts = [str(report), repr(report), report.to_json(tmp_path / "a.json"), dot]
    texts += map(report.why, (row.name for row in report.ops))
    logged = [r.getMessage() for r in caplog.records if r.name.startswith("autoamp")]
    assert logged
    told = autoamp.report(failed)
    for said in [*texts, *logged, str(told), told.to_json()]:
        assert said.replace("\n", "").isprintable()
    document = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert document["model"] == report.label
    # Quotes and line ends of a name do not end the string that they stand in.
    without = re.sub(r'"(?:[^"\\]|\\.)*"', "", dot)
    assert '"' not in without
    assert without.count("{") == without.count("}") == 2


def on_a_terminal(name: str) -> tuple[str, list[str]]:
    """What is shown of a model of that name, and the control sequences in it."""
    model = hostile(name)
    model(torch.randn(2, 8))
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=5000, legacy_windows=False)
    console.print(autoamp.report(model))
    control = r"\x1b(?:\[[0-9;]*[A-Za-z]|.)"
    shown = file.getvalue()
    return re.sub(control, "", shown), sorted(set(re.findall(control, shown)))


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_no_markup(kind: str) -> None:
    """On a terminal that knows colours and links."""
    shown, controls = on_a_terminal(NAMES[kind])
    assert controls == on_a_terminal("plain")[1]
    assert "\x1b" not in shown
    if kind in ("rich", "link", "html", "percent"):
        assert NAMES[kind] in shown


# -- folders ---------------------------------------------------------------------------


@pytest.mark.usefixtures("off_again")
@pytest.mark.parametrize("what", ["file", "below a file", "loop", "device", "long"])
def test_folders_that_cannot_be(what: str, tmp_path) -> None:
    file, loop = tmp_path / "file", tmp_path / "loop"
    file.write_text("mine")
    loop.symlink_to(loop)
    paths = {"file": file, "below a file": file / "reports", "loop": loop / "reports"}
    paths |= {"device": Path(os.devnull), "long": tmp_path / ("x" * 300)}
    with pytest.raises(autoamp.OptionError) as refused:
        autoamp.enable(report_dir=paths[what])
    says(refused, option="report_dir")
    assert_can_be_shown(str(refused.value))
    assert file.read_text() == "mine"


# -- rules files -----------------------------------------------------------------------

SECONDS = 30
"""The most that any file may take: a hundred times as long as the slowest does."""


def load(content: bytes, folder: Path) -> str:
    """What is said about a file of this content; "" where it is read."""
    path = folder / "hostile.toml"
    path.write_bytes(content)
    began = time.perf_counter()
    try:
        assert isinstance(Rules.load(path), Rules)
        said = ""
    except autoamp.RulesError as error:
        said = str(error)
        assert said.startswith(str(path))
        assert_can_be_shown(said)
    assert time.perf_counter() - began < SECONDS
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rules")


words = st.sampled_from(
    ["mm", "aten::exp", "softmax", "sum.dim_IntList", "meta", "reason", "when", "test"]
) | st.text(max_size=6)
quoted = words.map(lambda w: '"' + w.replace("\\", "\\\\").replace('"', '\\"') + '"')
keys = st.sampled_from(["mm", "exp", "reason", "when", "allow", "dtype"]) | quoted
scalars = st.recursive(
    quoted
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(["true", "1979-05-27", "07:32:00", "inf", "-nan", "0x7f", "''"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: f"[{', '.join(v)}]")
        | st.lists(st.tuples(keys, inner), max_size=3).map(
            lambda v: "{" + ", ".join(f"{k} = {x}" for k, x in v) + "}"
        )
    ),
    max_leaves=6,
)
CONDITIONS = [
    '[{test="reduces_at_least", value=9, category="deny", reason="x"}]',
    '[{test="device_is", value="", category="deny", reason="x"}]',
    *("[{}]", "[[]]"),
]
rules = st.fixed_dictionaries(
    {},
    optional={
        "reason": quoted,
        "restores": st.sampled_from(["true", "false", "1"]),
        "no_kernel": st.sampled_from(['["cpu"]', '"cpu"', "[1]", "[]"]),
        "fp32_operands": st.sampled_from(['["self"]', '["nothing"]', "{}"]),
        "when": st.sampled_from(CONDITIONS),
    },
).map(lambda d: "{" + ", ".join(f"{k} = {v}" for k, v in d.items()) + "}")
lines = (
    st.sampled_from(["[allow]", "[deny]", "[infer]", "[clear]", "[meta]", "[[deny]]"])
    | st.tuples(keys, scalars | rules).map(" = ".join)
    | st.tuples(st.sampled_from(["mm", "exp", "tanh"]), quoted | rules).map(" = ".join)
)
files = st.lists(lines, max_size=8).map("\n".join)
contents = files.map(lambda t: t.encode("utf-8", "surrogatepass")) | st.binary()


@pytest.mark.hypothesis
def test_any_rules_file_is_read_or_refused_for_a_reason(folder: Path) -> None:
    said: set[str] = set()

    @settings(max_examples=800, database=None)
    @given(contents)
    def check(content: bytes) -> None:
        said.add(load(content, folder).partition(": ")[2].rpartition(": ")[2][:12])

    check()
    assert "" in said
    assert len(said) > 10, "the examples would test one line of the parser"


MANY = 10**5
LARGE = {
    "an integer of 5000 digits": "[deny]\nmm = " + "9" * 5000,
    "a key of many parts": "a" + ".a" * MANY + " = 1",
    "a table of many parts": "[" + "a." * MANY + "a]",
    "a key of many parts with spaces": "[deny]\nmm" + " . x" * MANY + " = 1",
    "lists in lists": "x = " + "[" * MANY,
    "lists in lists, closed": "x = " + "[" * MANY + "]" * MANY,
    "tables in tables": "x = " + "{a = " * MANY,
    "many keys": "".join(f"k{i} = 1\n" for i in range(MANY // 2)),
    "many tables": "".join(f"[t{i}]\n" for i in range(MANY // 4)),
    "many ops": "[deny]\n" + "".join(f'op{i} = "x"\n' for i in range(MANY // 4)),
    "many conditions": "[deny]\nmm = {reason = 'x', when = [" + "{}, " * MANY + "]}",
    "a long name": f"[deny]\n{'a' * 5 * MANY} = 'x'",
    "too many bytes": "#" * (parse.MAX_BYTES + 1),
    "an escape in a name": '[deny]\n"\\u001b[31m\\u202emm" = "x"',
    "a private name": '[deny]\n"aten::__class__" = "x"\n"__init__.__globals__" = "x"',
}


@pytest.mark.parametrize("name", LARGE)
def test_large_and_deep_files_are_refused(name: str, folder: Path) -> None:
    assert load(LARGE[name].encode(), folder)


FORBIDDEN = {
    *("eval", "exec", "__import__", "os.system", "os.popen"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads"),
    *("shelve.open", "torch.load", "yaml.load", "runpy.run_path", "ctypes.CDLL"),
}


def named_in(source: str) -> set[str]:
    """Dotted names in a source; also by way of what was imported."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    parts = (name.partition(".") for name in names)
    return {known.get(head, head) + dot + rest for head, dot, rest in parts}


def test_the_package_runs_no_code_from_data() -> None:
    package = Path(autoamp.__file__).parent
    assert named_in("import pickle as p\np.loads(b'')") & FORBIDDEN
    for file in [*package.rglob("*.py"), package.parent / "autoamp_autoload.py"]:
        assert not named_in(file.read_text()) & FORBIDDEN, file


# -- checkpoints: loss scales and masters ----------------------------------------------

MASTERS = "autoamp_masters"
"""Where a saved optimizer has them."""

Trained = tuple[nn.Module, Optimizer]


def trained(model: nn.Module, dtype: torch.dtype = torch.float32) -> Trained:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    autoamp.convert(model, optimizer, **BF16)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8, dtype=dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def scaled() -> Trained:
    return trained(mlp())


@pytest.fixture(scope="module")
def half() -> Trained:
    return trained(mlp().bfloat16(), torch.bfloat16)


def everything(of: Trained) -> Any:
    model, optimizer = of
    return weights_of(model), optimizer.state_dict(), state_of(optimizer)


def loaded(of: Trained, state: dict[str, Any]) -> str:
    """What is said about a state; "" where it was loaded, and then it is put back."""
    before = copy.deepcopy(everything(of))
    try:
        of[1].load_state_dict(state)
    except autoamp.AutoampError as error:
        assert not differences(everything(of), before), "refused, and something changed"
        said = str(error)
        assert_can_be_shown(said)
        return said
    of[1].load_state_dict(before[1])
    return ""


def state_with(of: Trained, entry: Any) -> dict[str, Any]:
    state = copy.deepcopy(of[1].state_dict())
    state["param_groups"][0][boundary.KEY] = entry
    return state


def scale_with(of: Trained, **fields: Any) -> dict[str, Any]:
    entry = copy.deepcopy(of[1].state_dict()["param_groups"][0][boundary.KEY])
    entry["loss_scales"][0] |= fields
    return state_with(of, entry)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 2**31, 2**63])
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers()
    | st.builds(object)
    | st.sampled_from([torch.ones(()), torch.ones(8), "x" * 10**5, print, Optimizer]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=4,
)
FIELDS = sorted(autoamp.DynamicLossScale().state_dict())


@settings(max_examples=160)
@given(anything)
def test_any_entry_is_refused(scaled: Trained, half: Trained, entry: Any) -> None:
    assert "'autoamp' entry" in loaded(scaled, state_with(scaled, entry))
    said = loaded(scaled, state_with(scaled, {"loss_scales": [entry]}))
    assert "loss scale" in said or "does not fit" in said
    if entry is not None:
        masters = {**copy.deepcopy(half[1].state_dict()), MASTERS: entry}
        assert "masters" in loaded(half, masters)


@settings(max_examples=200)
@given(st.sampled_from(FIELDS), anything)
def test_any_field_of_a_scale(scaled: Trained, field: str, value: Any) -> None:
    """A scale that is loaded is usable: the next step has a finite one above 0."""
    model, optimizer = scaled
    before = copy.deepcopy(optimizer.state_dict())
    state = scale_with(scaled, **{field: value})
    if loaded(scaled, state):
        return
    optimizer.load_state_dict(state)
    model(torch.randn(4, 8)).sum().backward()
    assert 0 < autoamp.report(model).loss_scale.scale < math.inf
    optimizer.load_state_dict(before)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_is_named(scaled: Trained, field: str) -> None:
    state = scale_with(scaled, **{"\x1b[31mx": 1})
    assert "\\x1b[31mx" in loaded(scaled, state)
    state = scale_with(scaled)
    del state["param_groups"][0][boundary.KEY]["loss_scales"][0][field]
    assert field in loaded(scaled, state)


NOT_MASTERS = {
    "integers": torch.ones(8, dtype=torch.int32),
    "complex": torch.ones(8, dtype=torch.complex64),
    "another shape": torch.ones(4),
    "no data": torch.ones(8, device="meta"),
    "sparse": torch.ones(8).to_sparse(),
    "an object": object(),
    "a list": [1.0] * 8,
}


@pytest.mark.parametrize("kind", NOT_MASTERS)
@pytest.mark.parametrize("name", ["0.bias", "extra\x1b[31m"])
def test_what_is_no_master(half: Trained, kind: str, name: str) -> None:
    state = copy.deepcopy(half[1].state_dict())
    state[MASTERS][name] = NOT_MASTERS[kind]
    assert name.replace("\x1b", "\\x1b") in loaded(half, state)
