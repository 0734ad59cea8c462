"""Messages name an option in the words of whoever can change it."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import autoamp
import autoamp_autoload
from autoamp.auto.environment import read
from autoamp.messages import advice
from autoamp.training.blame.remedy import Remedy
from autoamp.training.options import Options
from tests.says import says

PACKAGE = Path(autoamp.__file__).parent
OPTIONS = [
    field.name
    for field in dataclasses.fields(Options)
    if field.name not in ("unlist", "own_keep", "unmet", "by_variables")
]
NAMES_AN_OPTION = re.compile(rf"(?<![\w.])({'|'.join(OPTIONS)})=")

SPEAK_PYTHON = {
    "passes/options.py": "likewise",
    "training/scale.py": "likewise; environment.py checks variables by itself",
    "auto/switch.py": "`unmet` is set by `enable(keep=...)` alone",
    "api.py": "the answer to a call of `convert`, made in Python",
    "runtime/eligible.py": "no variable gives `keep`; compiled models are not declined",
    "runtime/compile_backend.py": "an example of a call of torch.compile",
    "passes/decide/pins.py": "a report, which names options of `convert`",
    "reports/findings.py": "likewise",
    "tools/export_onnx.py": "the answer to a call of `export`, made in Python",
    "tools/export_results.py": "likewise",
}
"""The files with a text that names options in Python's words, and why they may."""


def texts(tree: ast.Module) -> list[str]:
    """The strings of a module that are no docstring."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docs
    ]


def test_no_message_of_the_automatic_mode_spells_an_option_for_python_alone() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        every = texts(ast.parse(path.read_text()))
        named = [text for text in every if NAMES_AN_OPTION.search(text)]
        if named:
            found[str(path.relative_to(PACKAGE))] = named
    assert {k: v for k, v in found.items() if k not in SPEAK_PYTHON} == {}
    assert SPEAK_PYTHON.keys() <= found.keys(), "a file needs no reason any more"


@pytest.mark.parametrize(
    ("option", "value", "python", "variable"),
    [
        ("do_no_harm", False, "do_no_harm=False", "AUTOAMP_DO_NO_HARM=0"),
        ("exact_casts", True, "exact_casts=True", "AUTOAMP_EXACT_CASTS=1"),
        ("loss_scale", 1, "loss_scale=1", "AUTOAMP_LOSS_SCALE=1"),
        ("backend", "eager", "backend='eager'", "AUTOAMP_BACKEND=eager"),
        ("fuse", {"gelu": False}, "fuse={'gelu': False}", "AUTOAMP_UNFUSED=gelu"),
        ("deny", ["exp", "sum"], 'deny=["exp", "sum"]', "AUTOAMP_DENYLIST_ADD=exp,sum"),
    ],
)
def test_an_option_has_two_spellings(
    option: str, value: object, python: str, variable: str
) -> None:
    assert advice(option, value, by_variables=False) == python
    said = advice(option, value, by_variables=True)
    assert said == variable
    options = read(dict([said.split("=")])).options
    assert options.by_variables
    assert getattr(options, option) == getattr(Options(**{option: value}), option)


def test_a_module_to_keep_is_named_in_a_variable() -> None:
    name, value = advice("keep", ["head.*", "fc"], by_variables=True).split("=")
    assert read({name: value}).options.keep == ("head.*", "fc")


@pytest.mark.usefixtures("no_units", "nothing_asked_for", "off_again")
@pytest.mark.parametrize(
    ("variables", "spelled"),
    [
        ({}, "AUTOAMP_DO_NO_HARM=0"),
        ({"AUTOAMP_DO_NO_HARM": "0"}, "AUTOAMP_LOSS_SCALE=1"),
    ],
)
def test_a_model_met_by_the_automatic_mode_is_told_of_variables(
    variables: dict[str, str], spelled: str, caplog, monkeypatch
) -> None:
    """Of what cannot pay; and of a scale that nobody lowers by a step."""
    caplog.set_level(logging.INFO, "autoamp")
    for name, value in {**ASKED, **variables}.items():
        monkeypatch.setenv(name, value)
    autoamp_autoload.autoload()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    for _ in range(4):
        (model(torch.ones(2, 8)).sum() * 1e30).backward()
    says(caplog.messages, option=spelled)
    assert not any(map(NAMES_AN_OPTION.search, caplog.messages))


ASKED = {"AUTOAMP_ENABLE": "1", "AUTOAMP_PRECISION": "fp16", "AUTOAMP_HOT": "0"}


def test_a_rule_is_proposed_as_variables() -> None:
    remedy = Remedy(deny=("aten::exp", "sum"), keep=("head",))
    assert remedy.advice(by_variables=False) == str(remedy)
    told = remedy.advice(by_variables=True)
    assert told == "AUTOAMP_DENYLIST_ADD=aten::exp,sum and AUTOAMP_KEEP=head"
