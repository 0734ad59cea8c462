"""Each tensor that autoamp makes has a dtype and a device of its own choice.

A process may have any default dtype and any default device.
"""

from __future__ import annotations

import ast
from pathlib import Path

import autoamp

ROOT = Path(autoamp.__file__).parent
STANDS_IN = "patches.py"
"""Calls the factories of torch in place of the user's own calls."""
FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "hann_window",
        "linspace",
    ),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm"),
    *("scalar_tensor", "tensor", "zeros"),
}


def _missing(tree: ast.AST) -> list[str]:
    """The mentions of factories, but for calls that name both a dtype and a device."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {
        id(call.func)
        for call in calls
        if {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    }
    return [
        f"line {node.lineno}: torch.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr in FACTORIES
        and id(node) not in named
    ]


def test_no_tensor_takes_the_default_dtype_or_device() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.name != STANDS_IN]
    missing = {path: _missing(ast.parse(path.read_text("utf-8"))) for path in files}
    assert not {path: found for path, found in missing.items() if found}


def test_a_factory_that_is_handed_on_is_found() -> None:
    made = "[make(3, device=d, dtype=t) for make in (torch.ones, torch.zeros)]"
    assert len(_missing(ast.parse(made))) == 2
