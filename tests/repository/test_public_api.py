"""The public surface: a name, a parameter or a default changes only on purpose."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

import autoamp
from autoamp.removed import NAMES as REMOVED
from autoamp.training.options import OPTION_NAMES, Options
from tests.says import says

NAMES = {
    "AutoampError",
    "Bench",
    "CaptureError",
    "CheckpointError",
    "Comparison",
    "ConvertOptions",
    "DynamicLossScale",
    "ExpertOptions",
    "ExportError",
    "LossScale",
    "LossScaleError",
    "LossScaleReport",
    "NoLossScale",
    "OptionError",
    "Overflow",
    "PlacementError",
    "Report",
    "Rules",
    "RulesError",
    "StaticLossScale",
    "UnsupportedModelError",
    "VerificationError",
    "bench",
    "compare",
    "convert",
    "disable",
    "disabled",
    "enable",
    "explain",
    "export",
    "find_overflow",
    "is_converted",
    "load",
    "report",
    "revert",
    "rewrite",
}

KEYWORDS: dict[str, Any] = {
    "precision": "auto",
    "keep": (),
    "allow": (),
    "deny": (),
    "infer": (),
    "clear": (),
    "rules": None,
    "loss_scale": "auto",
    "masters": "auto",
    "placement": "optimal",
    "objective": "time",
    "backend": "eager",
    "do_no_harm": True,
    "strict": False,
    "example_inputs": None,
}
"""What `convert` names after the model and its optimizer."""

EXPERT: dict[str, Any] = {
    "fuse": True,
    "guard": True,
    "weight_copies": "kept",
    "exact_casts": False,
    "calibrate": True,
}
"""The options for experts."""


PARAMETERS = {
    "revert": ["model"],
    "is_converted": ["model"],
    "report": ["model"],
    "disabled": [],
    "rewrite": ["gm", "example_inputs"],
}
"""The first parameters of functions; all of them, but for options."""


def test_names() -> None:
    assert sorted(autoamp.__all__) == dir(autoamp) == sorted(NAMES)
    for name in NAMES:
        assert (getattr(autoamp, name).__doc__ or "").strip(), name
        if name.endswith("Error"):
            assert issubclass(getattr(autoamp, name), autoamp.AutoampError)
    assert issubclass(autoamp.OptionError, ValueError)
    assert issubclass(autoamp.UnsupportedModelError, TypeError)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", autoamp.__version__)


def test_a_name_comes_from_the_module_that_type_checkers_are_told() -> None:
    tree = ast.parse(inspect.getsource(autoamp))
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("autoamp.")
        for alias in node.names
    }
    homes = {n: home for home, names in autoamp._HOMES.items() for n in names.split()}
    assert homes == told
    assert homes.keys() == NAMES


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_else() -> None:
    """Torch takes seconds to import, and Dynamo seconds more."""
    program = "import sys, autoamp; print(sorted({'torch', 'rich'} & {*sys.modules}))"
    assert python(program) == "[]\n"


FIRST_NAME = """
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
import autoamp
with {mode}:
    autoamp.convert
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
autoamp.convert(model, optimizer, precision="fp16", do_no_harm=False)
for _ in range(2):
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    optimizer.step()
    print(bool(torch.equal(before, model[0].weight)))
    optimizer.zero_grad()
print(type(autoamp.report(model).loss_scale.scale))
"""


@pytest.mark.parametrize(
    "mode", ["FakeTensorMode()", "torch.inference_mode()", "torch.device('meta')"]
)
def test_the_first_name_may_be_asked_for_in_any_mode(mode: str) -> None:
    """The modules that the name brings along make no tensors: these had the mode."""
    out = python(FIRST_NAME.format(mode=mode))
    assert out.splitlines() == ["False", "False", "<class 'float'>"]


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_says_what_to_use(name: str) -> None:
    assert name not in dir(autoamp)
    assert not hasattr(autoamp, name)
    with pytest.raises(AttributeError) as raised:
        getattr(autoamp, name)
    says(raised, f"autoamp.{name}", "removed", REMOVED[name])
    for there in re.findall(r"autoamp\.(\w+)", REMOVED[name]):
        assert there in NAMES


def test_a_name_that_never_was_is_no_removed_one() -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(autoamp, "never_was")  # noqa: B009 (mypy knows that it is not there)
    says(raised, "autoamp", "never_was")
    assert "removed" not in str(raised.value)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(autoamp, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == PARAMETERS[name]


def test_convert_names_what_most_users_need_and_takes_experts_options() -> None:
    parameters = dict(inspect.signature(autoamp.convert).parameters)
    assert list(parameters) == ["model", "optimizer", *KEYWORDS, "options"]
    assert all(
        each.kind is inspect.Parameter.KEYWORD_ONLY and each.default == KEYWORDS[name]
        for name, each in parameters.items()
        if name in KEYWORDS
    )
    assert parameters["options"].kind is inspect.Parameter.VAR_KEYWORD
    assert parameters["optimizer"].default is None
    chosen = Options()
    assert {name: getattr(chosen, name) for name in EXPERT} == EXPERT
    assert set(EXPERT) | set(KEYWORDS) - {"example_inputs"} == {*OPTION_NAMES}


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (autoamp.convert, ["model", "optimizer", *KEYWORDS, "options"]),
        (autoamp.ExpertOptions, EXPERT),
    ],
)
def test_each_option_is_explained(of: Any, names: Iterable[str]) -> None:
    doc = inspect.getdoc(of) or ""
    for name in names:
        assert re.search(rf"^\s*(\w+, |\*\*)*{name}(, \w+)*:", doc, re.MULTILINE), name
