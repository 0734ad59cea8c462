"""No room but training/ writes to the scaling of a model, or to its ledger."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoamp.training.scale import NoLossScale
from autoamp.training.scaling import ModelLedger, ModelScaling, ScaleDomain

PACKAGE = Path(__file__).resolve().parents[2] / "autoamp"
FIELDS = {each.name for each in dataclasses.fields(ModelScaling)} | set(
    vars(ModelLedger())
)
HOLDERS = {"scaling", "ledger"}
"""What variables and attributes that hold a scaling, or its ledger, are called."""


def writes(code: str) -> Iterator[str]:
    """Assignments to a field of something that is called a scaling, or a ledger."""
    for node in ast.walk(ast.parse(code)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and node.attr in FIELDS
        ):
            holder = ast.unparse(node.value).rsplit(".", 1)[-1]
            if holder in HOLDERS:
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_other_room_writes_to_a_scaling() -> None:
    files = [p for p in PACKAGE.rglob("*.py") if "training" not in p.parts]
    assert len(files) > 100
    assert [(str(p), each) for p in files for each in writes(p.read_text())] == []


@pytest.mark.parametrize(
    "code",
    [
        "state.engine.record.scaling.automatic = True",
        "scaling.ledger.foreign = None",
        "ledger.in_a_row += 1",
        "scaling.domain, x = 1, 2",
        "for scaling.label in (): pass",
    ],
)
def test_a_write_is_found(code: str) -> None:
    assert list(writes(code))


def test_a_scaling_is_frozen() -> None:
    scaling = ModelScaling(ScaleDomain(NoLossScale()), "Model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaling.label = "Other"  # type: ignore[misc]
