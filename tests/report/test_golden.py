"""The words and figures of reports: texts of small models, kept beside this file.

`REWRITE_GOLDEN=1 pytest tests/report/test_golden.py` writes them anew.  All reports
are explained for a named device, so that they are the same on every machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import autoamp
from autoamp_cli import main
from tests.report.page_models import Embedded, Layers, ResNet
from tests.small_models import Of

GOLDEN = Path(__file__).parent / "golden"


class Net(nn.Module):
    """Layers that repeat, an op that is denied, a norm, sizes that miss multiples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(250, 250) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(250), nn.Linear(250, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.exp(layer(x)) * 2
        return torch.log_softmax(self.head(self.norm(x)), -1)


@torch.library.custom_op("autoamp_test_golden::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


DENIED = ["sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "erf", "exp"]
DENIED += ["log1p", "expm1"]


def many(m: Any, x: Tensor) -> Tensor:
    """More reasons for fp32 than a report lists, more places, and an op in no list."""
    x = m.fc(x)
    for number, name in enumerate(DENIED, 1):
        x = m.fc(getattr(torch, name)(x[: 10 * number]).repeat(20, 1))
    x = m.fc(x.exp())
    x = m.fc(x.neg().exp())
    return twice(m.kept(x.abs().exp()))


def explained(model: nn.Module, *args: Tensor, **options: object) -> autoamp.Report:
    given = {"precision": "bf16", "do_no_harm": False, "deny": ["exp"], **options}
    return autoamp.explain(model, *args, **given, device="cuda:sm_80")


def report(**options: object) -> autoamp.Report:
    return explained(Net(), torch.ones(4096, 250), **options)


def layers() -> autoamp.Report:
    return explained(Layers(1), torch.randn(4, 16))


def embedded() -> autoamp.Report:
    return explained(Embedded(), torch.zeros(4, 8).long())


def many_reasons() -> autoamp.Report:
    model = Of(many, fc=nn.Linear(64, 64), kept=nn.Linear(64, 64))
    options = {"deny": DENIED, "keep": ["kept"]}
    return explained(model.requires_grad_(False), torch.ones(200, 64), **options)


def out_of_range() -> autoamp.Report:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    with torch.no_grad():
        model[0].weight[0, 0], model[0].bias[:] = 1e5, 1e-9
        for layer in model[1:]:
            layer.bias[:] = 1e-9
        model[4].weight[0, :3] = 1e-9
    return explained(model, torch.randn(8, 64), precision="fp16")


def data_of(made: autoamp.Report) -> dict[str, Any]:
    """The data that a page holds."""
    found = re.search(r'"application/json"[^>]*>(.*?)</script>', made.to_html(), re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def page(made: autoamp.Report) -> str:
    """The data of a page, a line for each box, node and reason."""

    def lines(value: Any, depth: int = 0) -> Iterator[str]:
        for key, each in value.items():
            if depth < 2 and isinstance(each, list):
                yield f"{' ' * depth}{key}"
                for one in each:
                    if depth or not isinstance(one, dict) or "nodes" not in one:
                        yield f"{' ' * depth} {json.dumps(one, ensure_ascii=False)}"
                    else:
                        yield from lines(one, depth + 1)
            else:
                yield f"{' ' * depth}{key}: {json.dumps(each, ensure_ascii=False)}"

    return "\n".join(lines(data_of(made)))


def boxes_and_plumbing() -> str:
    """The boxes of a small ResNet, each with the ops in it, and what is hidden."""
    made = explained(ResNet((1, 1)), torch.randn(2, 3, 32, 32))
    (graph,) = data_of(made)["graphs"]
    said = []
    for index, box in enumerate(graph["groups"]):
        nodes = [n for n in graph["nodes"] if n["group"] == index]
        ops = [n["title"] for n in nodes if n["decision"]]
        hidden = [n["title"] for n in nodes if n["is_plumbing"]]
        said.append(f"{box['parent']} {box['path']} ({box['label']}): {ops} {hidden}")
    return "\n".join(said)


def why_of(made: autoamp.Report) -> str:
    """The answer for every op and cast of every graph."""
    return "\n".join(
        made.why(row.name, section.key)
        for section in made.sections
        for row in (*section.ops, *section.casts)
    )


def differences(*flags: str) -> str:
    """What `autoamp diff` says of the same model under other options."""
    runner = CliRunner(env={"COLUMNS": "150", "TERM": "dumb"})
    kept = explained(Embedded(), torch.zeros(4, 8).long(), keep=["out"])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        embedded().to_json("old.json")
        kept.to_json("new.json")
        made = runner.invoke(main, ["diff", "old.json", "new.json", *flags])
    return f"{made.exit_code}\n{made.output}".rstrip()


TEXTS: dict[str, Callable[[], str]] = {
    "summary": lambda: str(report()),
    "full": lambda: report().full(),
    "memory": lambda: report(objective="memory").full(),
    "kept": lambda: str(report(keep=["layers.0"])),
    "dot": lambda: report().to_dot(),
    "why": lambda: "\n".join(map(report().why, ("linear", "exp", "mul", "layer_norm"))),
    "many": lambda: f"{many_reasons()}\n\n{many_reasons().full()}",
    "layers": lambda: f"{layers().full()}\n\n{why_of(layers())}",
    "layers_page": lambda: page(layers()),
    "embedded": lambda: f"{why_of(embedded())}\n\n{page(embedded())}",
    "boxes": boxes_and_plumbing,
    "weights": lambda: f"{out_of_range()}\n\n{out_of_range().full()}",
    "diff": lambda: f"{differences()}\n{differences('--json')}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_the_golden_one(name: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()  # which remembers the sizes that other tests called with
    said = re.sub(r"took \d+ ms.*?\)\.", "took T.", TEXTS[name](), flags=re.DOTALL)
    said += "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")
