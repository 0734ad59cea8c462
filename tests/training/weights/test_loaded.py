"""Weights as `from_pretrained` leaves them are watched like any others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import autoamp
from autoamp.runtime.conversion import conversion_of
from autoamp.training.weight_copies import own_loaded_weights


def small() -> hf.GPT2LMHeadModel:
    config = hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    return hf.GPT2LMHeadModel(config).eval()


@pytest.fixture
def loaded(tmp_path) -> hf.GPT2LMHeadModel:
    small().save_pretrained(tmp_path)
    return hf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()


def refreshed_in(model: nn.Module, calls: int) -> int:
    ids = torch.arange(4)[None]
    with torch.no_grad():
        for _ in range(calls):
            model(ids)
    state = conversion_of(model)
    return sum(g.copies.refreshed for g in state.engine.record.graphs if g.copies)


def test_a_loaded_model_casts_its_weights_once(loaded: hf.GPT2LMHeadModel) -> None:
    before = {n: p.clone() for n, p in loaded.named_parameters()}
    objects = [id(p) for p in loaded.parameters()]
    autoamp.convert(loaded, precision="bf16", do_no_harm=False, strict=True)
    once = refreshed_in(loaded, 1)
    assert once > 0
    assert refreshed_in(loaded, 3) == once
    assert [id(p) for p in loaded.parameters()] == objects
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, before[name])


def test_only_loaded_weights_are_moved(loaded: hf.GPT2LMHeadModel) -> None:
    assert own_loaded_weights(small()) == 0
    count = len(list(loaded.parameters()))
    assert own_loaded_weights(nn.ModuleDict({"inner": loaded})) == count
    assert own_loaded_weights(loaded) == 0


def test_memory_given_to_torch_stays_where_it_is() -> None:
    array = np.ones((4, 4), dtype=np.float32)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.from_numpy(array))
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    x = torch.eye(4)
    with torch.no_grad():
        model(x)
        array[:] = 3.0
        assert torch.equal(model.weight, torch.full((4, 4), 3.0))
        error = (model(x) - model.bias - 3.0).abs().max()
    assert error <= 3 * torch.finfo(torch.bfloat16).eps


def test_the_report_says_what_is_copied_at_every_call() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.from_numpy(np.ones((4, 4), dtype=np.float32)))
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    with torch.no_grad():
        model(torch.eye(4))
    assert autoamp.report(model).unwatched == 1
    report = autoamp.report(model)
    assert "copies 1 weight to the low dtype again" in report.full()
    assert "other code may hold" in " ".join(str(report).split())
    model.weight.data = model.weight.data.clone()
    with torch.no_grad():
        model(torch.eye(4))
    assert autoamp.report(model).unwatched == 0
    assert "anew" not in str(autoamp.report(model))
