"""`autoamp compare` of real trainings: the step and the op of what was planted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autoamp.errors import OptionError
from autoamp.runs.compare import compare
from tests.runs.recorded import STEPS, Net, train

AT = 7


def other_rate(step: int, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == AT:
        optimizer.param_groups[0]["lr"] = 0.5


def other_weight(step: int, net: nn.Module, _: torch.optim.Optimizer) -> None:
    if step == AT:
        with torch.no_grad():
            net.get_submodule("second").weight.mul_(3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain"))


@pytest.mark.thorough
def test_the_same_training_agrees_to_the_bit(plain: Path, tmp_path: Path) -> None:
    found = compare(plain, train(tmp_path))
    assert (found.status, found.unequal, found.steps) == (0, None, (1, STEPS))
    assert found.firsts == {}
    assert {*found.changed} <= {"argv"}


@pytest.mark.thorough(but=["0-precisions1"])
@pytest.mark.parametrize(
    "precisions", [("bf16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32")]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_other_rounding_is_no_parting(
    precisions: tuple[str, str], seed: int, tmp_path: Path
) -> None:
    one = train(tmp_path / "a", precisions[0], seeds=(seed, 0), steps=40)
    other = train(tmp_path / "b", precisions[1], seeds=(seed, 0), steps=40)
    found = compare(one, other)
    assert found.precisions == precisions
    assert (found.parted, found.unequal, found.steps) == (None, 1, (1, 40))
    strict = compare(one, other, tolerance=1e-9)
    assert (strict.parted, strict.why) == (1, "numbers")


@pytest.mark.thorough
def test_compiled_beside_eager(tmp_path: Path) -> None:
    """Without dropout, for which inductor draws random numbers of its own."""

    class Still(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop.p = 0.0

    one = train(tmp_path / "a", model=Still)
    other = train(tmp_path / "b", model=Still, backend="inductor")
    bugged = train(tmp_path / "c", model=Still, backend="inductor", bug=other_weight)
    found = compare(one, other)
    assert (found.parted, found.changed["backend"]) == (None, ["default", "inductor"])
    assert compare(one, bugged).parted == AT


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_another_rate_parts_at_the_step_after(
    precision: str, plain: Path, tmp_path: Path
) -> None:
    found = compare(plain, train(tmp_path, precision, bug=other_rate))
    assert (found.parted, found.why, found.start) == (AT + 1, "numbers", False)
    assert found.firsts.get("batch") is found.firsts.get("rng") is None


@pytest.mark.thorough(but=["bf16"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_changed_weight_is_found_with_its_op(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOAMP_RECORD_OPS", "*")
    one = train(tmp_path / "a")
    found = compare(one, train(tmp_path / "b", precision, bug=other_weight))
    assert found.parted == AT
    assert found.op is not None
    assert found.op.name.startswith("second:linear ")
    assert found.op.b == pytest.approx(3 * found.op.a, rel=0.1)
    shown = next(row for row in found.around if row.step == AT)
    before = next(op for op in shown.ops if op.name.startswith("first:linear "))
    assert before.parts is False


def test_other_data_is_said_first(plain: Path, tmp_path: Path) -> None:
    swapped = {AT: AT + 1, AT + 1: AT}
    found = compare(plain, train(tmp_path, data=lambda s: swapped.get(s, s)))
    assert (found.parted, found.why) == (AT, "data")
    assert found.firsts["batch"] == AT


def test_other_weights_at_the_start(plain: Path, tmp_path: Path) -> None:
    found = compare(plain, train(tmp_path, seeds=(1, 0)))
    assert (found.parted, found.why, found.start) == (1, "numbers", True)
    assert found.firsts == {}


def test_other_random_numbers(plain: Path, tmp_path: Path) -> None:
    found = compare(plain, train(tmp_path, seeds=(0, 1)))
    assert found.firsts == {"rng": 1}
    assert found.parted == 1


def test_another_skipped_step(tmp_path: Path) -> None:
    def overflow(step: int) -> float:
        return 1e5 if step == AT else 1.0

    one = train(tmp_path / "a", "fp16")
    found = compare(one, train(tmp_path / "b", "fp16", scale=overflow))
    assert (found.parted, found.why) == (AT, "skipped")
    assert found.firsts["taken"] == AT
    assert found.firsts["scale"] == AT + 1


def test_another_model_is_refused(plain: Path, tmp_path: Path) -> None:
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(32, 4, bias=False)

    Wider.__name__ = "Net"
    with pytest.raises(OptionError, match=r"second\.bias of Net is \[4\] in A and"):
        compare(plain, train(tmp_path, model=Wider))
