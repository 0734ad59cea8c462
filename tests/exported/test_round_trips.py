"""Checkpoints trained with autoamp and loaded without, and the other way round."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autoamp
from tests.exported.test_export import X, two
from tests.small_models import BF16


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model.eval()


def by_pickle(state: dict[str, Tensor], _: Path) -> dict[str, Tensor]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    found: dict[str, Tensor] = torch.load(buffer, weights_only=True)
    return found


def by_safetensors(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    save_file(state, folder / "m.safetensors")
    return load_file(folder / "m.safetensors")


WAYS = {"torch": by_pickle, "safetensors": by_safetensors}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_trained_with_autoamp_is_a_plain_one(
    way: str, tmp_path: Path
) -> None:
    ours = trained(autoamp.convert(two(), **BF16))
    state = WAYS[way](ours.state_dict(), tmp_path)
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


@pytest.mark.thorough(but=["safetensors"])
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_checkpoint_loads_into_a_converted_model(
    way: str, tmp_path: Path
) -> None:
    state = WAYS[way](trained(two()).state_dict(), tmp_path)
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
