"""What ranks tell each other at a first step; a store plays the other rank."""

from __future__ import annotations

import datetime as dt
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoamp import compat
from autoamp.errors import RankError
from autoamp.training import ranks
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.scale import NoLossScale
from tests.says import says


class Store:
    """Rank 1 says what rank 0 says, with `otherwise`; None: it says nothing."""

    timeout = dt.timedelta(seconds=1)

    def __init__(self, otherwise: dict[str, str] | None) -> None:
        self.otherwise = otherwise
        self.words: dict[str, str] = {}

    def set(self, key: str, words: str) -> None:
        self.words[key] = words
        if self.otherwise is not None:
            other = json.loads(words) | self.otherwise
            self.words[key.removesuffix("0") + "1"] = json.dumps(other)

    def get(self, key: str) -> str:
        return self.words[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.words for key in keys)


def shake(monkeypatch: pytest.MonkeyPatch, otherwise: dict[str, str] | None) -> None:
    """The first step of rank 0 of two."""
    monkeypatch.setattr(compat, "default_store", lambda: Store(otherwise))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(ranks, "PATIENCE", 0.0)
    optimizer = torch.optim.SGD([torch.ones(1)], 0.1)
    team: Any = ranks.Team([SimpleNamespace(group_name="both")])
    scaling = ModelScaling(NoLossScale(), "Net")
    ranks.shake_hands(optimizer, team, [scaling], [])
    assert ranks.have_shaken_hands(optimizer)


def test_ranks_that_say_the_same_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shake(monkeypatch, {})


def test_a_rank_that_has_converted_otherwise_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RankError) as raised:
        shake(monkeypatch, {"precision": "fp16"})
    says(raised, "precision", "fp16 on rank 1")


def test_other_graphs_are_told_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shake(monkeypatch, {ranks._GRAPHS: "other"})
    says(caplog.messages, "other on rank 1")


def test_a_rank_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankError) as raised:
        shake(monkeypatch, None)
    says(raised, "rank 1", "Net")
