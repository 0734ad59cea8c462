"""The public surface: a name, a parameter or a default changes only on purpose."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import autoamp

PACKAGE = Path(autoamp.__file__).parent

NAMES = {
    "AutoampError",
    "Bench",
    "Budget",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "Comparison",
    "DynamicLossScale",
    "ExportError",
    "Frontier",
    "LockError",
    "LossScale",
    "LossScaleError",
    "LossScaleReport",
    "MeshPlan",
    "Monitor",
    "NoLossScale",
    "OptionError",
    "Overflow",
    "PlacementError",
    "Plan",
    "Report",
    "Rules",
    "RulesError",
    "StaticLossScale",
    "Tuning",
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
    "plan",
    "report",
    "revert",
    "rewrite",
    "tune",
}

FOR_CONVERT = {"budget": None, "calibrate_on": None, "example_inputs": None}
"""Arguments of `convert` alone, which no other function takes as options."""

OPTIONS: dict[str, Any] = {
    "precision": "auto",
    "rules": None,
    "allow": (),
    "deny": (),
    "infer": (),
    "clear": (),
    "keep": (),
    "loss_scale": "auto",
    "backend": "eager",
    "placement": "optimal",
    "objective": "time",
    "do_no_harm": True,
    "strict": False,
    "weight_copies": "kept",
    "lock": None,
    "heal": False,
    "guard": True,
    "fuse": True,
    "unfused": (),
    "exact_casts": False,
    "calibrate": True,
    "record": None,
}


def test_names() -> None:
    assert set(autoamp.__all__) == NAMES
    assert len(autoamp.__all__) == len(NAMES)
    for name in NAMES:
        assert hasattr(autoamp, name)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", autoamp.__version__)


def test_convert_takes_what_the_options_are() -> None:
    parameters = dict(inspect.signature(autoamp.convert).parameters)
    assert list(parameters)[:2] == ["model", "optimizer"]
    keywords = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords == {**OPTIONS, **FOR_CONVERT}
    assert parameters["optimizer"].default is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("revert", ["model"]),
        ("is_converted", ["model"]),
        ("report", ["model"]),
        ("disabled", []),
    ],
)
def test_parameters(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(autoamp, name)).parameters) == parameters


def test_rewrite_parameters() -> None:
    parameters = list(inspect.signature(autoamp.rewrite).parameters)
    assert parameters[:2] == ["gm", "example_inputs"]


def test_convert_explains_each_parameter() -> None:
    doc = inspect.getdoc(autoamp.convert) or ""
    for name in inspect.signature(autoamp.convert).parameters:
        assert re.search(rf"^\s*(\w+, )*{name}(, \w+)*:", doc, re.MULTILINE), name


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_says_what_it_is(name: str) -> None:
    doc = (getattr(autoamp, name).__doc__ or "").strip()
    assert doc
    assert doc.splitlines()[0].endswith((".", ":", ",")) or "\n" in doc


def undocumented(path: Path) -> list[str]:
    """Public functions and classes without a docstring, and the file if it has none."""
    tree = ast.parse(path.read_text(), str(path))
    found = [] if ast.get_docstring(tree) else [f"{path.name}: module"]
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    return found + [
        f"{path.name}:{node.lineno} {node.name}"
        for node in public
        if not ast.get_docstring(node)
    ]


DOCUMENTED = [
    PACKAGE / "__init__.py",
    PACKAGE / "api.py",
    PACKAGE / "questions.py",
    PACKAGE / "errors.py",
    PACKAGE / "options.py",
    *sorted(
        path
        for room in ("model", "capture", "weights", "scaling", "optimizer")
        for path in (PACKAGE / room).glob("*.py")
    ),
]


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_public_function_has_a_docstring(path: Path) -> None:
    assert undocumented(path) == []


def test_a_missing_docstring_is_found(tmp_path) -> None:
    path = tmp_path / "bare.py"
    path.write_text("def f():\n    pass\n\n\ndef _g():\n    pass\n")
    assert undocumented(path) == ["bare.py: module", "bare.py:1 f"]


def test_every_error_is_an_autoamp_error() -> None:
    errors = [getattr(autoamp, n) for n in NAMES if n.endswith("Error")]
    assert all(issubclass(e, autoamp.AutoampError) for e in errors)
    assert issubclass(autoamp.OptionError, ValueError)
    assert issubclass(autoamp.UnsupportedModelError, TypeError)
