"""A low dtype is a row of `autoamp/dtypes.py`: no other code names one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoamp.dtypes import LOW_TABLE, TORCH_NAMES

PACKAGE = Path(__file__).resolve().parents[2] / "autoamp"
NAMES = {*TORCH_NAMES, *(f"torch.{name}" for name in TORCH_NAMES)} | {
    row.name for row in LOW_TABLE
}

ALLOWED = {
    "dtypes.py": "the table",
    "place/devices.py": "the table of devices names the usual dtype of each type",
    "inspect/findings.py": "advice for weights that fp16 cannot hold",
    "rules/model.py": "TensorFlow has lists for these two dtypes and no other",
    "analyse/facts.py": "oneDNN has a kernel of LSTMs for this dtype alone",
    "compat/gradients.py": "asks torch of one dtype how autograd treats any low one",
}
"""The files that name a low dtype, each with the reason."""


def named_in(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name wherever code is, or says, the name of a low dtype.

    A docstring or a message that holds a name among other words is prose.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.lineno, str(node.value)


@pytest.mark.parametrize(
    "source",
    ["low = torch.bfloat16", "x.bfloat16()", "if name == 'fp16': pass", "{'bf16': 1}"],
)
def test_a_name_is_found_in_code(source: str) -> None:
    assert list(named_in(source))


def test_prose_may_name_dtypes() -> None:
    assert not list(named_in('"""fp16 overflows."""\nraise E("use bf16 instead")'))


def test_only_the_table_names_low_dtypes() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := list(named_in(path.read_text(encoding="utf-8"))))
    }
    assert found.keys() == ALLOWED.keys(), {
        path: names for path, names in found.items() if path not in ALLOWED
    }
