"""Checkpoints trained with autoamp and loaded without, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autoamp
from tests.small_models import BF16
from tests.tools.export.programs import X, two


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model.eval()


def saved(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The state of a model, once through torch's file and once through safetensors'."""
    torch.save(model.state_dict(), folder / "m.pt")
    save_file(torch.load(folder / "m.pt", weights_only=True), folder / "m.safetensors")
    return load_file(folder / "m.safetensors")


def test_a_checkpoint_trained_with_autoamp_is_a_plain_one(tmp_path: Path) -> None:
    ours = trained(autoamp.convert(two(), **BF16))
    state = saved(ours, tmp_path)
    assert {t.dtype for t in state.values()} == {torch.float32}
    plain = two()
    plain.load_state_dict(state)
    again = autoamp.export(plain, (X,), **BF16)
    program = autoamp.export(ours, (X,))
    with torch.no_grad():
        expected = ours(X)
        for each in (program, again):
            assert torch.equal(each.module()(X), expected)
    assert not torch.equal(expected, autoamp.convert(two(), **BF16)(X))


def test_a_plain_checkpoint_loads_into_a_converted_model(tmp_path: Path) -> None:
    state = saved(trained(two()), tmp_path)
    model = autoamp.convert(two(), **BF16)
    with torch.no_grad():
        before = model(X)  # makes low copies of the weights that are replaced
        model.load_state_dict(state)
        program = autoamp.export(model, (X,))
        expected = model(X)
    assert torch.equal(program.module()(X), expected)
    assert not torch.equal(before, expected)


def test_weights_of_a_program_load_into_a_half_model() -> None:
    """The names of a program's weights are the model's: torch reads them as such."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    program = autoamp.export(model, (X,), **BF16)
    half: Any = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    half.bfloat16().load_state_dict(program.state_dict, strict=True)
    with torch.no_grad():
        result = half(X.bfloat16()).float()
        assert torch.equal(result, program.module()(X))
