"""The example that `make demo` runs, and the one that README begins with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import train_digits as example

SCRIPT = Path(example.__file__)


def test_models_of_one_seed_are_equal_and_of_two_differ() -> None:
    first, second, other = (example.make_model(seed) for seed in (0, 0, 1))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first[0].weight, other[0].weight)


def test_images_are_split_without_overlap_or_loss() -> None:
    train_x, train_y, test_x, test_y = example.load_images()
    assert train_x.shape[1:] == test_x.shape[1:] == (1, 8, 8)
    assert len(train_x) == len(train_y)
    assert len(train_x) + len(test_x) == 1797
    assert sorted(set(test_y.tolist())) == list(range(10))
    assert 0 <= float(train_x.min()) <= float(train_x.max()) <= 1


def test_batches_are_whole_and_follow_the_seed() -> None:
    images, labels = torch.arange(10.0), torch.arange(10)
    torch.manual_seed(3)
    first = [y.tolist() for _, y in example.batches(images, labels, 4)]
    torch.manual_seed(3)
    again = [y.tolist() for _, y in example.batches(images, labels, 4)]
    assert first == again
    assert [len(y) for y in first] == [4, 4]
    assert len({i for y in first for i in y}) == 8


def test_accuracy_is_the_percentage_right() -> None:
    model = torch.nn.Identity()
    scores = torch.eye(4)
    assert example.accuracy(model, scores, torch.tensor([0, 1, 2, 0])) == 75


def test_training_learns() -> None:
    train_x, train_y, test_x, test_y = example.load_images()
    model = example.make_model(0)
    before = example.accuracy(model, test_x, test_y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    example.train(model, optimizer, train_x, train_y, epochs=1, batch=64, seed=0)
    assert before < 40
    assert example.accuracy(model, test_x, test_y) > 70


def test_excerpt_keeps_operations_only_and_says_what_it_left_out() -> None:
    graph = """
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[2]"):
        # File: somewhere.py:1, code: y = f(x)
        y: "f32[2]" = torch.ops.aten.relu.default(x);  x = None
        z: "f32[2]" = torch.ops.aten.neg.default(y);  y = None
        return (z,)
"""
    assert example.excerpt(graph, 1) == (
        'y: "f32[2]" = torch.ops.aten.relu.default(x)\n# ... and 1 more'
    )
    assert example.excerpt(graph, 2).count("\n") == 1


def test_capability_says_plainly_when_there_are_no_bf16_units(monkeypatch) -> None:
    monkeypatch.setattr(example, "bf16_units", list)
    assert "slower than fp32" in example.capability_line()
    monkeypatch.setattr(example, "bf16_units", lambda: ["amx_bf16"])
    assert "bf16 units: amx_bf16" in example.capability_line()


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as `make demo` runs it."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_demo_agrees_to_two_points_and_shows_the_graph() -> None:
    done = run_example("--epochs", "3", "--rounds", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in ("This machine:", "fp32", "the graph before", "bfloat16"):
        assert wanted in done.stdout
    assert "within 2" in done.stdout


def test_the_demo_fails_when_the_accuracies_part(monkeypatch, capsys) -> None:
    found = iter([99.0, 96.9])
    monkeypatch.setattr(example, "accuracy", lambda *_: next(found))
    monkeypatch.setattr(example, "show_report", lambda *_: None)
    assert example.main(["--epochs", "0", "--rounds", "1"]) == 1
    assert "MORE THAN 2" in capsys.readouterr().out


def test_the_first_example_of_readme_runs_and_shows_bf16(capsys) -> None:
    text = SCRIPT.parent.parent.joinpath("README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(blocks[0], "README.md", "exec"), {})
    assert "bf16" in capsys.readouterr().out
