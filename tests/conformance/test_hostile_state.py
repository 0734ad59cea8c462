"""Hostile checkpoints: loss scales and masters of any content.

Loaded, or refused by an error of ours that names what is wrong, with nothing changed.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

import autoamp
from autoamp.training import boundary
from autoamp.training.masters import KEY as MASTERS
from tests.conformance.table import Figures
from tests.training.steps import BF16, differences, mlp, state_of, weights_of

Trained = tuple[nn.Module, Optimizer]


def trained(model: nn.Module, dtype: torch.dtype = torch.float32) -> Trained:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    autoamp.convert(model, optimizer, **BF16)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8, dtype=dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def scaled() -> Trained:
    return trained(mlp())


@pytest.fixture(scope="module")
def half() -> Trained:
    return trained(mlp().bfloat16(), torch.bfloat16)


def everything(of: Trained) -> Any:
    model, optimizer = of
    return weights_of(model), optimizer.state_dict(), state_of(optimizer)


def load(of: Trained, state: dict[str, Any]) -> str:
    """What is said about a state; "" where it was loaded, and then it is put back."""
    before = copy.deepcopy(everything(of))
    good = before[1]
    try:
        of[1].load_state_dict(state)
    except autoamp.AutoampError as error:
        assert not differences(everything(of), before)
        said = str(error)
        assert said.replace("\n", "").isprintable()
        assert 0 < len(said) <= 4000
        return said
    of[1].load_state_dict(copy.deepcopy(good))
    return ""


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 2**31, 2**63])
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers()
    | st.builds(object)
    | st.sampled_from([torch.ones(()), torch.ones(8), "x" * 10**5, print, Optimizer]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=4,
)


# -- the loss scale --------------------------------------------------------------------

FIELDS = sorted(autoamp.DynamicLossScale().state_dict())


@settings(max_examples=80)
@given(anything)
def test_any_entry(scaled: Trained, entry: Any) -> None:
    state = copy.deepcopy(scaled[1].state_dict())
    state["param_groups"][0][boundary.KEY] = entry
    assert "'autoamp' entry" in load(scaled, state)


@settings(max_examples=80)
@given(st.lists(anything, min_size=1, max_size=2))
def test_any_list_of_scales(scaled: Trained, scales: list[Any]) -> None:
    state = copy.deepcopy(scaled[1].state_dict())
    state["param_groups"][0][boundary.KEY] = {"loss_scales": scales}
    assert "loss scale" in load(scaled, state) or "does not fit" in load(scaled, state)


@settings(max_examples=200)
@given(st.sampled_from(FIELDS), anything)
def test_any_field_of_a_scale(scaled: Trained, field: str, value: Any) -> None:
    """What is loaded is usable: the next step has a finite scale above 0."""
    model, optimizer = scaled
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    state["param_groups"][0][boundary.KEY]["loss_scales"][0][field] = value
    if load(scaled, state):
        return
    optimizer.load_state_dict(state)
    model(torch.randn(4, 8)).sum().backward()
    report = autoamp.report(model).loss_scale
    assert 0 < report.scale < math.inf
    optimizer.load_state_dict(before)


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(scaled: Trained, field: str) -> None:
    state = copy.deepcopy(scaled[1].state_dict())
    del state["param_groups"][0][boundary.KEY]["loss_scales"][0][field]
    assert field in load(scaled, state)


def test_the_fuzz_accepts_and_refuses(scaled: Trained, figures: Figures) -> None:
    """Or the tests above would say nothing of the one or the other."""
    state = scaled[1].state_dict()
    assert load(scaled, copy.deepcopy(state)) == ""
    state["param_groups"][0][boundary.KEY]["loss_scales"][0]["\x1b[31mx"] = 1
    assert "unknown '\\x1b[31mx'" in load(scaled, state)
    figures.count("states", 440)


# -- masters ---------------------------------------------------------------------------

NOT_MASTERS = {
    "integers": torch.ones(8, dtype=torch.int32),
    "complex": torch.ones(8, dtype=torch.complex64),
    "another shape": torch.ones(4),
    "no data": torch.ones(8, device="meta"),
    "sparse": torch.ones(8).to_sparse(),
    "an object": object(),
    "a list": [1.0] * 8,
}


@settings(max_examples=80)
@given(anything.filter(lambda entry: entry is not None))
def test_any_masters(half: Trained, entry: Any) -> None:
    state = copy.deepcopy(half[1].state_dict())
    state[MASTERS] = entry
    assert "masters" in load(half, state)


@pytest.mark.parametrize("kind", NOT_MASTERS)
@pytest.mark.parametrize("name", ["0.bias", "extra\x1b[31m"])
def test_what_is_no_master(half: Trained, kind: str, name: str) -> None:
    state = copy.deepcopy(half[1].state_dict())
    state[MASTERS][name] = NOT_MASTERS[kind]
    assert name.replace("\x1b", "\\x1b") in load(half, state)


def test_ten_thousand_masters_too_many(half: Trained) -> None:
    state = copy.deepcopy(half[1].state_dict())
    state[MASTERS] |= {f"extra{i}": torch.ones(1) for i in range(10**4)}
    assert "extra0" in load(half, state)
