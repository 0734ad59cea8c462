"""A file that was changed or cut is refused, or gives the same numbers."""

from __future__ import annotations

import copy
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16
from tests.tools.export.programs import FP16, X, run, two

FLIPS, CUTS = 24, 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind, and one of the same model with other weights."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for name, model in (("m", two()), ("other", two())):
        if name == "other":
            model.requires_grad_(False)[0].weight.neg_()
        for suffix, options in (("pt2", BF16), ("onnx", FP16)):
            path = found[f"{name}.{suffix}"] = folder / f"{name}.{suffix}"
            autoamp.export(model, (X,), target=suffix, out=path, **options)  # type: ignore[arg-type]
    return found


def numbers(path: Path) -> Tensor | None:
    """The results of a file; None where it is refused."""
    try:
        loaded = autoamp.load(path)
    except autoamp.AutoampError as error:
        says(error, path.name)
        return None
    if path.suffix == ".onnx":
        (result,) = run(path, X)
        return result
    with torch.no_grad():
        result = loaded.module()(X)
        assert isinstance(result, Tensor)
        return result


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_flipped_bits_and_cut_files(
    suffix: str, files: dict[str, Path], tmp_path: Path
) -> None:
    data, expected = files[f"m.{suffix}"].read_bytes(), numbers(files[f"m.{suffix}"])
    assert expected is not None
    draw = random.Random(0)
    spoiled = [data[: draw.randrange(len(data))] for _ in range(CUTS)]
    for _ in range(FLIPS):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        spoiled.append(bytes(flipped))
    refused = 0
    for each in spoiled:
        path = tmp_path / f"m.{suffix}"
        path.write_bytes(each)
        found = numbers(path)
        refused += found is None
        assert found is None or torch.equal(found, expected)
    assert refused >= FLIPS  # few bits say nothing, as a date in an archive


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_part_of_another_file_is_refused(
    files: dict[str, Path], tmp_path: Path
) -> None:
    """The archive is whole then, and its checksums fit."""
    own, others = members_of(files["m.pt2"]), members_of(files["other.pt2"])
    assert own.keys() == others.keys()
    assert numbers(packed(tmp_path / "m.pt2", own)) is not None
    for name in own:
        mixed = packed(tmp_path / "m.pt2", {**own, name: others[name]})
        assert (numbers(mixed) is None) == (own[name] != others[name])


def test_a_part_that_is_gone_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    own = members_of(files["m.pt2"])
    del own["archive/byteorder"]
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.load(packed(tmp_path / "m.pt2", own))
    says(raised, "m.pt2", "archive/byteorder")


def test_a_second_file_with_other_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoamp.tools.export_onnx._LARGE", 1000)
    path = tmp_path / "m.onnx"
    autoamp.export(two(), (X,), target="onnx", out=path, **FP16)
    weights = bytearray((tmp_path / "m.onnx.data").read_bytes())
    weights[100] ^= 1
    (tmp_path / "m.onnx.data").write_bytes(weights)
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.load(path)
    says(raised, "m.onnx.data", "changed")


def test_a_program_that_another_tool_saved_again_has_no_note(tmp_path: Path) -> None:
    program = autoamp.export(two(), (X,), **BF16)
    torch.export.save(program, tmp_path / "m.pt2")
    assert torch.equal(
        autoamp.load(tmp_path / "m.pt2").module()(X), program.module()(X)
    )


def test_an_onnx_model_that_another_tool_wrote_again_is_the_same(
    files: dict[str, Path], tmp_path: Path
) -> None:
    onnx.save(onnx.load(files["m.onnx"]), tmp_path / "m.onnx")
    assert numbers(tmp_path / "m.onnx") is not None


# -- state -----------------------------------------------------------------------------


class Counts(nn.Module):
    """Writes to a buffer that is not of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.seen = nn.Buffer(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean(0))
        return self.linear(x) + self.seen


def normed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64, **options)
    return nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 64))


@pytest.mark.parametrize(
    ("make", "named"),
    [(normed, ["1.running_mean", "model.eval()"]), (Counts, ["seen", "arguments"])],
)
def test_a_model_that_writes_its_buffers_is_refused_by_onnx(
    make: Callable[[], nn.Module], named: list[str], tmp_path: Path
) -> None:
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(make(), (X,), target="onnx", out=tmp_path / "m.onnx", **FP16)
    says(raised, *named)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("target", ["onnx", "pt2"])
@pytest.mark.parametrize(
    "model",
    [
        normed().eval(),
        normed(track_running_stats=False),
        nn.Sequential(
            nn.Unflatten(1, (4, 16)),
            nn.InstanceNorm1d(4, track_running_stats=True),
            nn.Linear(16, 64),
        ),
    ],
    ids=["eval", "no statistics", "instance norm"],
)
def test_norms_that_keep_nothing_give_the_models_results(
    target: Any, model: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / f"m.{target}"
    autoamp.export(model, (X,), target=target, out=path, **FP16)
    found = numbers(path)
    assert found is not None
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(X.double())
        ours = autoamp.convert(copy.deepcopy(model), **FP16)(X)
    errors = [float((each - exact).norm()) for each in (found, ours)]
    assert errors[0] <= 1.1 * errors[1]  # the bound of docs/accuracy.md


def test_onnx_says_that_it_leaves_an_argument_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    given = {"target": "onnx", "out": tmp_path / "m.onnx"}
    autoamp.export(Writes(64, 64).eval(), (X.clone(),), **given, **FP16)
    assert any("writes to x" in text for text in warned(caplog))


def test_onnx_refuses_a_model_that_returns_nothing(tmp_path: Path) -> None:
    class Nothing(nn.Linear):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            super().forward(x)

    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(
            Nothing(64, 64).eval(), (X,), target="onnx", out=tmp_path / "m.onnx", **FP16
        )
    says(raised, "returns no tensor")
