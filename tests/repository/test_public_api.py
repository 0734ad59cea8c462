"""The public surface: a name, a parameter or a default changes only on purpose."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import autoamp
from autoamp.removed import NAMES as REMOVED
from tests.says import says

NAMES = {
    "AutoampError",
    "Bench",
    "CaptureError",
    "CheckpointError",
    "Comparison",
    "ConvertOptions",
    "DynamicLossScale",
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

FOR_CONVERT = {"example_inputs": None}
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
    "masters": "auto",
    "guard": True,
    "fuse": True,
    "exact_casts": False,
    "calibrate": True,
}


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


def test_convert_takes_what_the_options_are() -> None:
    parameters = dict(inspect.signature(autoamp.convert).parameters)
    assert list(parameters)[:2] == ["model", "optimizer"]
    keywords = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords == {**OPTIONS, **FOR_CONVERT}
    assert parameters["others"].kind is inspect.Parameter.VAR_KEYWORD
    assert parameters["optimizer"].default is None


def test_convert_explains_each_parameter() -> None:
    doc = inspect.getdoc(autoamp.convert) or ""
    for name in inspect.signature(autoamp.convert).parameters:
        assert re.search(rf"^\s*(\w+, |\*\*)*{name}(, \w+)*:", doc, re.MULTILINE), name
