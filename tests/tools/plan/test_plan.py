"""`plan` predicts, without weights, what a real step then holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import autoamp
import autoamp_cli
from autoamp import api
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.tools.bench_meters import Held
from tests.metrics import saved_bytes
from tests.says import says
from tests.small_models import BF16
from tests.tools.plan.door import (
    AUTOAMP,
    AUTOCAST,
    FP32,
    IN_FP32,
    bytes_of,
    devices,
    named_model,
)

transformers = pytest.importorskip("transformers")

GPT2 = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 200, "n_positions": 32}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2_NAME = f"transformers:GPT2Config({', '.join(f'{k}={v}' for k, v in GPT2.items())})"


class Mlp(nn.Module):
    """Two products whose weights are one parameter, a norm and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(512, 512), nn.LayerNorm(512)
        self.down = nn.Linear(512, 512)
        self.down.weight = self.up.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(512))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))) + self.shift


class Reads(nn.Linear):
    """Looks at the value of a tensor, which no tensor without data has."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 0:
            return super().forward(x)
        return x


@pytest.fixture(scope="module")
def gpt2() -> autoamp.Plan:
    return autoamp.plan(GPT2_NAME, batch=2, sequence=32, device="cpu", **BF16)


def test_saved_bytes_are_those_of_a_real_run(gpt2: autoamp.Plan) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).train()
    ids = torch.zeros(2, 32, dtype=torch.long)
    own = ids.untyped_storage().nbytes()  # the call's argument, which is there before
    weights = list(model.parameters())

    def saved() -> int:
        found = saved_bytes(lambda: model(ids, labels=ids).loss, weights)
        return found.activations - own

    assert gpt2.way(FP32).saved == saved()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gpt2.way(AUTOCAST).saved == saved()
    autoamp.convert(model, **BF16)
    saved()  # captures
    assert gpt2.way(AUTOAMP).saved == saved()


def test_weights_gradients_and_state_are_what_torch_allocates(
    gpt2: autoamp.Plan,
) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(2, 32, dtype=torch.long)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    way = gpt2.way(FP32)
    assert way.weights == bytes_of([*model.parameters(), *model.buffers()])
    assert way.gradients == bytes_of([p.grad for p in model.parameters()])
    assert way.optimizer == bytes_of(list(optimizer.state.values()))
    assert gpt2.parameters == sum(p.numel() for p in model.parameters())


def test_the_peak_is_that_of_a_real_step(gpt2: autoamp.Plan) -> None:
    """But for the few bytes that kernels hold inside, which no tensor shows."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).train()
    held = Held(torch.device("cpu"))
    ids = torch.zeros(2, 32, dtype=torch.long)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    step()
    here = bytes_of([*model.parameters(), *model.buffers()])
    measured = (held.peak(step) or 0) + here - ids.untyped_storage().nbytes()
    planned = gpt2.way(FP32).peak - gpt2.way(FP32).optimizer
    assert planned == pytest.approx(measured, rel=1e-3)


def test_the_order_of_the_ways_and_their_peaks(gpt2: autoamp.Plan) -> None:
    assert [way.name for way in gpt2.ways] == [FP32, AUTOCAST, AUTOAMP]
    for way in gpt2.ways:
        resident = way.weights + way.optimizer + way.copies
        assert resident + way.saved <= way.peak
        assert way.peak < resident + way.saved + way.gradients + way.saved
    assert gpt2.way(FP32).copies == 0 < gpt2.way(AUTOAMP).copies
    assert gpt2.samples == 2
    assert gpt2.tokens == 64


@pytest.fixture(scope="module")
def mlp() -> autoamp.Plan:
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(4096, 512)
    before = [*map(id, (*model.parameters(), *model.buffers()))]
    found = autoamp.plan(model, x, device="cuda:sm_80", optimizer="sgd")
    assert before == [*map(id, (*model.parameters(), *model.buffers()))]
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def test_a_shared_weight_counts_once_and_a_frozen_one_has_no_gradient(
    mlp: autoamp.Plan,
) -> None:
    weights = 4 * (512 * 512 + 5 * 512)
    assert mlp.way(FP32).weights == weights
    assert mlp.way(FP32).gradients == weights - 2 * 4 * 512
    assert mlp.way(FP32).optimizer == mlp.way(FP32).gradients  # the momentum


def test_autocast_for_a_gpu_computes_the_norm_in_fp32(mlp: autoamp.Plan) -> None:
    """The values it keeps: x and the norm's result low, the rest as on a GPU."""
    x = 4096 * 512
    statistics = 2 * 4 * 4096
    # x in fp16; the norm's operand in fp32; relu's result in fp32 and in fp16.
    assert mlp.way(AUTOCAST).saved == (2 + 4 + 4 + 2) * x + statistics


def test_times_are_those_of_explain(mlp: autoamp.Plan) -> None:
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(4096, 512)
    told = api.explain(model, x, device="cuda:sm_80").headline
    without = autoamp.plan(model, x, device="cuda:sm_80", optimizer="none")
    assert without.way(FP32).seconds == told.seconds_fp32
    bandwidth = devices.figures()["sm_80"]["bytes_per_ns"]
    for name, seconds in (
        (AUTOCAST, told.seconds_autocast),
        (AUTOAMP, told.seconds),
    ):
        way = without.way(name)
        assert way.copies > 0
        casts = 3 * way.copies / bandwidth * 1e-9
        assert way.seconds == pytest.approx((seconds or 0) + casts, rel=1e-9)
    assert (mlp.way(FP32).seconds or 0) > (told.seconds_fp32 or 0)  # the optimizer


def test_the_table_and_the_json_hold_the_figures(mlp: autoamp.Plan) -> None:
    printed = str(mlp)
    assert max(map(len, printed.splitlines())) <= 80
    for words in ("tokens", "saved activations", "peak memory", "fits 80.0 GB"):
        assert (words in printed) == (words != "tokens")
    read = json.loads(mlp.to_json())
    assert read["ways"][0]["peak"] == mlp.way(FP32).peak
    assert read["ways"][0]["fits"] is True
    assert read["schema"] == 1


def test_a_call_for_inference_keeps_nothing_and_has_no_optimizer() -> None:
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(64, 512)
    found = autoamp.plan(model, x, device="cuda:sm_70", inference=True)
    assert model.training
    for way in found.ways:
        assert way.saved == way.gradients == way.optimizer == 0
    assert found.precision == "fp16"


def test_memory_is_told_where_a_source_tells_it() -> None:
    assert devices.memory_of("cuda:sm_90") == 80 * 10**9
    assert devices.memory_of("cuda:sm_100") is None
    for row in devices.figures().values():
        assert ("memory_gb" in row) == (" GB" in row.get("model", ""))


def test_functions_in_fp32_are_those_that_autocast_knows_on_gpus() -> None:
    """Composed functions reach the dispatcher as others of the list."""
    composed = {"cross_entropy", "norm", "normalize", "softmin"}
    ask: Any = torch._C._dispatch_has_kernel_for_dispatch_key

    def known(name: str) -> bool:
        overloads = getattr(torch.ops.aten, name).overloads()
        ops = [f"aten::{name}" + f".{o}" * (o != "default") for o in overloads]
        return any(ask(op, "AutocastCUDA") for op in ops)

    plain = [n for n in IN_FP32 - composed if not n.startswith("__")]
    assert [name for name in plain if not known(name)] == []


def test_a_config_file_and_a_type_of_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    file = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2}
    path.write_text(json.dumps({**file, "dtype": "bfloat16"}))
    model, (_, kwargs) = named_model(str(path), batch=3)
    assert type(model) is transformers.GPT2LMHeadModel
    assert kwargs["input_ids"].shape == kwargs["labels"].shape == (3, 32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.is_meta for p in model.parameters())
    small = "(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)"
    for config, kind in (("BertConfig", "BertForMaskedLM"), ("ViTConfig", None)):
        name = f"transformers:{config}{small}"
        model, (_, kwargs) = named_model(name, batch=2, trains=False)
        assert "labels" not in kwargs
        assert kind in (None, type(model).__name__)
    assert kwargs["pixel_values"].shape == (2, 3, 224, 224)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("transformers:NoSuchConfig()", "no configuration NoSuchConfig"),
        ("transformers:no-such", "no type of model 'no-such'"),
        ("transformers:GPT2Config(n_layer=open('x'))", "no literal"),
        ("transformers:GPT2Config(__import__('os'))", "a name with keywords"),
        ("transformers:os.system('true')", "write a name"),
        ("transformers:GPT2Config(**{})", "a name with keywords"),
        ("transformers:GPT2Config(", "write a name"),
        ("transformers:GPT2Config(n_embd=7, n_head=2)", "cannot be made"),
        ("transformers:Wav2Vec2Config()", "MODULE:FACTORY"),
        ("absent/config.json", "cannot be read"),
    ],
)
def test_a_wrong_name_is_told(name: str, problem: str) -> None:
    with pytest.raises(OptionError) as raised:
        named_model(name)
    says(raised, problem)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError) as raised:
        autoamp.plan("transformers:gpt2")
    says(raised, "transformers", "installed")


def test_what_cannot_be_planned_is_told() -> None:
    x, layer = torch.ones(64, 64), nn.Linear(64, 64)
    with pytest.raises(UnsupportedModelError):
        autoamp.plan(Reads(64, 64), x, device="cuda:sm_80")
    with pytest.raises(UnsupportedModelError):
        autoamp.plan(layer, x, device="cpu:plain")
    for wrong, said in (({"optimizer": "adam"}, "adamw"), ({"batch": 0}, "batch")):
        with pytest.raises(OptionError) as raised:
            autoamp.plan(layer, x, **wrong)
        says(raised, said)


FACTORY = """
import torch
from torch import nn

def example():
    assert torch.empty(1).is_meta
    return nn.Linear(512, 512), (torch.empty(4096, 512),)
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(autoamp_cli.main, ["plan", *arguments])

    done = call("planned:example", "--device", "cuda:sm_90", "--json", "plan.json")
    assert done.exit_code == 0, done.output
    assert "H100" in done.output
    assert json.loads(Path("plan.json").read_text())["device"] == "cuda:sm_90"
    piped = call("planned:example", "--device", "cuda:sm_90", "--json", "-")
    assert json.loads(piped.stdout)["optimizer"] == "AdamW"
    for arguments, problem in (
        (("planned:example", "--batch", "2"), "makes its own arguments"),
        (("planned:absent",), "has no absent"),
        (("transformers:none",), "no type of model"),
        (("planned:example", "--device", "cuda:sm_1"), "figures are known for"),
    ):
        wrong = call(*arguments)
        assert wrong.exit_code == 2
        says(wrong.output, problem)
