"""Reports and the code of graphs are the same bytes in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import autoamp
from tests.report.test_report import net_report
from tests.strategies import ALL, Program, capture, inputs

REPO = Path(__file__).resolve().parents[2]

PACKAGE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcdef"})

    def forward(self, x):
        parts = {name: head(x) for name, head in self.heads.items()}
        loss = sum(part.exp().mean() for part in parts.values())
        torch._dynamo.graph_break()
        return torch.relu(loss * x)
"""

WRITES = """
import json, sys
junk = [object() for _ in range(4711)]  # moves all that is made later
from tests.whole.test_same_bytes import written
print(json.dumps(written(sys.argv[1])))
"""


def written(root: str) -> dict[str, str]:
    """All that is compared; `root` holds the package of a model."""
    import torch

    sys.path.insert(0, root)
    try:
        from package.deep.net import Net
    finally:
        sys.path.remove(root)
    torch.manual_seed(0)
    options = {"precision": "bf16"}
    steps = [(op, 3 * i, 5 * i + 1) for i, op in enumerate(ALL)]
    program = capture(Program(steps, [7, 11, 13], "mse"))
    given = inputs(grad=False)
    rewritten = autoamp.rewrite(program, given, precision="bf16", do_no_harm=False)
    return {
        "explained": autoamp.explain(
            Net(), torch.ones(4, 8), **options, device="cpu:amx"
        ).to_json(),
        "converted": net_report().to_json(),
        "a program of every op there is": rewritten.code,
    }


def folder_with_package(root: Path) -> str:
    deep = root / "package" / "deep"
    deep.mkdir(parents=True)
    for folder in (root / "package", deep):
        (folder / "__init__.py").touch()
    (deep / "net.py").write_text(PACKAGE)
    return str(root)


def of_process(folder: Path, cwd: Path, **variables: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITES, folder_with_package(folder)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO), **variables},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_processes_hash_seeds_and_folders_make_no_difference(tmp_path: Path) -> None:
    first = of_process(tmp_path / "one", REPO, PYTHONHASHSEED="0")
    seed = {"PYTHONHASHSEED": "4711"}
    other = of_process(tmp_path / "a b" / "other", tmp_path, **seed)
    assert other == first
    assert "_bf16 = " in first["a program of every op there is"]
    document = json.loads(first["explained"])
    assert len(document["graphs"]) == 2
    assert {op["source"].partition(":")[0] for op in document["ops"]} == {
        "package/deep/net.py"
    }
    assert {op["origin"] for op in document["ops"]} <= {"bf16.toml", "type promotion"}
    assert str(tmp_path) not in first["explained"]
    assert str(REPO) not in first["explained"]
