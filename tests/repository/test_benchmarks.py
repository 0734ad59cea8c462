"""The harness measures what it says; its figures are not judged here."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks import __main__ as harness
from benchmarks import emitted, first_table, report
from benchmarks.capability import capability
from benchmarks.peers import BASELINE, Peer, peers, ready
from benchmarks.timing import interleaved, ratios
from benchmarks.workloads import MICRO_BATCHES, Workload, workloads

QUICK = workloads(quick=True)
MLP = next(w for w in QUICK if w.name.startswith("mlp") and w.kind == "training")


def test_workloads_are_those_of_the_design() -> None:
    names = " ".join(w.name for w in workloads(quick=False))
    for model in ("resnet50", "vit_b", "gpt2", "bert", "t5", "mlp"):
        assert model in names
    assert {w.kind for w in QUICK} == {"training", "micro-batches", "inference"}
    assert [p.name for p in peers()] == [
        "fp32",
        "autocast",
        "compile",
        "compile + autocast",
        "model.bfloat16()",
        "autoamp",
        "autoamp inductor",
    ]


def test_each_round_has_every_step_and_no_step_has_one_predecessor() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    taken = interleaved(steps, rounds=12)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 36, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    before_c = Counter(one for one, other in itertools.pairwise(calls) if other == "c")
    assert before_c["a"] >= 3
    assert before_c["b"] >= 3
    assert [len(times) for times in taken.values()] == [12, 12, 12]


def test_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    taken = {"base": [1.0, 10.0, 2.0], "x": [2.0, 30.0, 2.0]}
    assert ratios(taken, "base") == {"base": 1.0, "x": 2.0}


def test_a_training_step_is_all_micro_batches_and_one_optimizer_step() -> None:
    many = Workload("mlp", "micro-batches", MLP.build, MLP.batch)
    forwards: list[int] = []
    prepared = ready(many, MLP.build(), Peer("fp32"), "cpu")
    prepared.model.register_forward_hook(lambda *_: forwards.append(1))
    before = [p.detach().clone() for p in prepared.model.parameters()]
    prepared.step()
    assert len(forwards) == MICRO_BATCHES
    pairs = zip(prepared.model.parameters(), before, strict=True)
    assert all(not torch.equal(p, b) for p, b in pairs)


def test_peers_do_not_share_weights() -> None:
    original = MLP.build()
    before = [p.detach().clone() for p in original.parameters()]
    for peer in peers()[:2]:
        ready(MLP, original, peer, "cpu").step()
    pairs = zip(original.parameters(), before, strict=True)
    assert all(torch.equal(p, b) for p, b in pairs)


def test_figures_of_one_workload() -> None:
    chosen = [
        p for p in peers() if p.name in (BASELINE, "autocast", "model.bfloat16()")
    ]
    found = harness.run(MLP, chosen, rounds=2, device="cpu")
    assert found["fp32"]["time_ratio"] == 1.0
    assert found["fp32"]["casts"] == 0
    # 2 weights, 2 biases, the input; up: the loss's `.float()`; the backward of these.
    assert found["autocast"]["casts"] == 11
    assert found["autocast"]["low_share"] == 1.0
    assert found["autocast"]["saved_weight_copies"] > 0
    assert found["model.bfloat16()"]["saved_bytes"] < found["fp32"]["saved_bytes"]
    assert len(harness.rows(MLP, found)) == len(chosen)


def test_a_failing_peer_is_told_and_the_others_go_on() -> None:
    def fail(model: Any) -> Any:
        raise RuntimeError("no such thing here")

    found = harness.run(MLP, [Peer(BASELINE), Peer("broken", fail)], 1, "cpu")
    assert found["broken"] == {"failed": "RuntimeError: no such thing here"}
    assert found["fp32"]["time_ratio"] == 1.0
    assert harness.rows(MLP, found)[1][3] == "failed"


def test_the_command_writes_a_table_and_json(tmp_path, capsys) -> None:
    arguments = ["--quick", "--only", "mlp batch 1", "--peers", "autocast"]
    assert harness.main([*arguments, "--rounds", "1", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "cpu-quick.md").read_text()
    assert text in capsys.readouterr().out
    assert text.startswith(capability("cpu"))
    data = json.loads((tmp_path / "cpu-quick.json").read_text())
    assert data["rounds"] == 1
    (result,) = data["results"]
    assert list(result["peers"]) == ["fp32", "autocast"]
    assert result["peers"]["autocast"]["casts"] == 5


@pytest.mark.parametrize("arguments", [["--peers", "fp33"], ["--only", "nothing"]])
def test_an_unknown_name_is_an_error(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        harness.main(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_markdown_wants_whole_rows() -> None:
    assert report.markdown(["a", "b"], [["x", "1"]]).splitlines() == [
        "| a   |   b |",
        "| --- | --: |",
        "| x   |   1 |",
    ]
    with pytest.raises(ValueError, match="needs 2 cells"):
        report.markdown(["a", "b"], [["x"]])


def test_capability_names_the_processor_and_torch() -> None:
    line = capability("cpu")
    assert torch.__version__ in line
    assert "cores" in line


def test_a_hash_of_what_is_emitted_shows_a_change(
    tmp_path, monkeypatch, capsys
) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    few = ["--only", "mlp", "--graphs", "3"]
    monkeypatch.setattr("sys.argv", ["emitted", str(before), *few])
    assert emitted.main() == 0
    again = ["emitted", str(after), "--against", str(before), *few]
    monkeypatch.setattr("sys.argv", again)
    assert emitted.main() == 0
    monkeypatch.setattr(emitted, "code_of", lambda gm: f"{gm.code} # changed")
    assert emitted.main() == 1
    assert "5 differ" in capsys.readouterr().out


def test_readmes_table_is_made_of_the_committed_tables() -> None:
    text = (first_table.RESULTS.parent.parent / "README.md").read_text("utf-8")
    assert report.markdown(first_table.HEADER, first_table.rows()) in text
    assert len(text.splitlines()) <= 130
