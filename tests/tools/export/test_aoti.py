"""Packages of AOTInductor: what they answer, and what a failure leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.says import says
from tests.small_models import BF16
from tests.tools.export.programs import plan_of

# torch's own, when inductor copies the shape of the arguments.
OF_TORCH = "ignore:.*LeafSpec:FutureWarning"


def make_model() -> nn.Module:
    """Two linear layers with a GELU between."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()


class Compiled(NamedTuple):
    """A package, and what it was made of."""

    path: Path
    model: nn.Module
    program: torch.export.ExportedProgram
    requests: list[Tensor]

    @torch.no_grad()
    def check(self, answers: list[Tensor]) -> None:
        """Checks answers against the program's.

        A package leaves roundings of its program out and adds none, so that it is about
        as near to fp64 as the program; each is then within twice the program's error of
        the other.
        """
        run, exact = self.program.module(), make_model().double()
        for request, answer in zip(self.requests, answers, strict=True):
            expected = run(request)
            error = float((expected - exact(request.double())).abs().max())
            assert answer.dtype == expected.dtype == torch.float32
            assert answer.shape == expected.shape
            # The last layer runs in bf16, and its result is cast.
            assert torch.equal(answer, answer.bfloat16().float())
            assert float((answer - expected).abs().max()) <= 2 * error


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A converted model in a package that takes batches of any size."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    requests = [torch.randn(batch, 64) for batch in (8, 3)]
    model = autoamp.convert(make_model(), **BF16)
    program = autoamp.export(
        model,
        (requests[0],),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        target="aoti",
        out=path,
    )
    return Compiled(path, model, program, requests)


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
def test_a_package_answers_as_the_program_that_it_was_compiled_from(
    compiled: Compiled,
) -> None:
    package = autoamp.load(compiled.path)
    compiled.check([package(request) for request in compiled.requests])
    run = compiled.program.module()
    for request in compiled.requests:
        assert torch.equal(run(request), compiled.model(request))
    assert [p.name for p in compiled.path.parent.iterdir()] == ["model.pt2"]


ALONE = """
import sys, torch
folder, path = sys.argv[1:]
package = torch._inductor.aoti_load_package(path)
answers = [package(request) for request in torch.load(folder + "/requests.pt")]
torch.save(answers, folder + "/answers.pt")
sys.exit("autoamp" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
def test_a_package_runs_where_autoamp_is_not_imported(
    compiled: Compiled, tmp_path: Path
) -> None:
    torch.save(compiled.requests, tmp_path / "requests.pt")
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path), str(compiled.path)],
        env=ours,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled.check(torch.load(tmp_path / "answers.pt"))


@pytest.mark.slow
@pytest.mark.filterwarnings(OF_TORCH)
def test_a_package_carries_the_plan_of_its_program(compiled: Compiled) -> None:
    package = torch._inductor.aoti_load_package(str(compiled.path))
    plan = json.loads(package.get_metadata()["autoamp"])
    assert plan == json.loads(json.dumps(plan_of(compiled.program)))
    assert plan["target"] == "aoti"
    assert plan["weights"]["0.weight"] == {"source": "0.weight", "dtype": "bfloat16"}
    assert {op["precision"] for op in plan["report"]["ops"]} == {"bf16"}


@pytest.mark.parametrize("older", [b"older", None], ids=["older", "none"])
def test_a_compilation_that_fails_leaves_the_folder_as_it_was(
    older: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, package_path: Any, **__: object) -> None:
        package_path.write(b"half of a package")
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    out = tmp_path / "model.pt2"
    if older is not None:
        out.write_bytes(older)
    x = torch.randn(8, 64)
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(make_model(), (x,), target="aoti", out=out, **BF16)
    says(raised, "aoti", "no C++ compiler")
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert left == ({} if older is None else {"model.pt2": older})
