"""A step on many devices: its links, extrapolated as captured whole, split by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import autoamp
import autoamp_cli
from autoamp import compat
from autoamp.errors import OptionError
from autoamp.training.options import Options
from tests.says import says
from tests.tools.plan.door import (
    AUTOAMP,
    AUTOCAST,
    FP32,
    Link,
    Mesh,
    Sent,
    Setting,
    WayStep,
    as_rank,
    devices,
    mesh,
    named_model,
    parallelized,
    plan,
    ranks,
    way_of,
    ways,
)

pytest.importorskip("transformers")

LAYERS = 7
BF16 = torch.bfloat16
LINKS = dict.fromkeys(("dp", "tp", "pp"), Link("a link", 1.0, 0.0))
"""A byte a nanosecond, and no latency."""
SLOW = Link("slow", 2.0, 100.0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Layers that are alike, and a head that takes more memory than they do."""

    def __init__(self, layers: int = LAYERS, head: int = 2048) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64) for _ in range(layers))
        self.head = nn.Linear(64, head)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def deep(rows: int = 8, **asked: Any) -> tuple[Deep, Tensor]:
    with torch.device("meta"):
        return Deep(**asked), torch.empty(rows, 64)


def setting() -> Setting:
    options = Options().replace(precision="bf16", do_no_harm=False)
    return Setting(
        options, BF16, devices.named_device("cuda:sm_90", BF16), on_mesh=True
    )


def llama(layers: int, *, heads: int, vocabulary: int) -> str:
    return (
        f"transformers:LlamaConfig(num_hidden_layers={layers}, hidden_size=64, "
        f"intermediate_size=128, num_attention_heads={heads}, vocab_size={vocabulary})"
    )


def run(model: nn.Module, call: Any, **asked: Any) -> dict[str, WayStep]:
    return ways.steps_of(model, call, setting(), **asked)


def test_axes_come_in_any_order_and_may_be_left_out() -> None:
    assert mesh.parsed_mesh("pp=4, dp=512,tp=8") == Mesh(512, 8, 4)
    assert mesh.parsed_mesh("tp=2") == Mesh(1, 2, 1)
    assert Mesh(512, 8, 4).devices == 16_384
    assert mesh.parsed_mesh(str(Mesh(3, 2, 1))) == Mesh(3, 2, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "''"),
        ("ep=2", "ep=2"),
        ("dp=2,dp=4", "dp"),
        ("dp=0", "dp=0"),
        ("dp=1.5", "dp=1.5"),
        ("dp=²", "above 0"),
        ("dp=1000,tp=1001", "1,001,000"),
        ("dp=" + "9" * 5000, "devices"),
    ],
)
def test_a_text_that_names_no_mesh_is_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError) as raised:
        mesh.parsed_mesh(text)
    says(raised, said)


def test_replicas_fill_the_devices_and_fewer_stages_fit_few() -> None:
    many = Mesh(512, 8, 4)
    assert mesh.scaled(many, 16_000) == Mesh(500, 8, 4)
    assert mesh.scaled(many, 8) == Mesh(1, 8, 1)
    assert mesh.scaled(Mesh(1, 2, 8), 8) == Mesh(1, 2, 4)
    assert mesh.scaled(Mesh(1, 12, 1), 8) == Mesh(1, 6, 1)


def test_an_axis_that_leaves_the_node_takes_the_network() -> None:
    found = mesh.links_of(Mesh(dp=4, tp=2, pp=2), "cuda:sm_90", node=8, network=400)
    speeds = {axis: (link.name, link.bytes_per_ns) for axis, link in found.items()}
    inside = "NVLink 4", 450
    assert speeds == {"tp": inside, "dp": inside, "pp": ("400 Gb/s", 50)}
    found = mesh.links_of(Mesh(tp=16), "cuda:sm_90", node=8, network=100)
    assert found["tp"].bytes_per_ns == 12.5


def test_every_gpu_of_the_table_has_a_link() -> None:
    gpus = [name for name, row in devices.figures().items() if row["type"] == "cuda"]
    assert all(
        mesh.links_of(Mesh(), f"cuda:{name}", 8, 400)["tp"].name for name in gpus
    )


@pytest.mark.parametrize(
    ("device", "node", "network", "said"),
    [
        ("cpu", 8, 400, "cuda:sm_70"),
        ("cuda:sm_90", 0, 400, "node"),
        ("cuda:sm_90", 8, 0, "gigabits"),
    ],
)
def test_links_that_do_not_exist(
    device: str, node: int, network: int, said: str
) -> None:
    with pytest.raises(OptionError) as raised:
        mesh.links_of(Mesh(), device, node, network)
    says(raised, said)


@pytest.mark.parametrize(
    ("kind", "size", "devices", "wire", "took"),
    [
        # Of 800 bytes on four devices three of four parts go round; to reduce, twice.
        ("all-gather", 800, 4, 600, 3 * 100 + 300),
        ("reduce-scatter", 800, 4, 600, 3 * 100 + 300),
        ("all-reduce", 800, 2, 800, 2 * 100 + 400),
        ("send", 800, 4, 800, 100 + 400),
        # A ring of 1,024 has 2,046 messages, two trees have 20.
        ("all-reduce", 1024, 1024, 2 * 1023, 20 * 100 + 1024),
        ("all-reduce", 8e9, 4, 12e9, 6 * 100 + 6e9),
        ("all-reduce", 800, 1, 0, 0),
    ],
)
def test_collectives_by_hand(
    kind: str, size: float, devices: int, wire: float, took: float
) -> None:
    """At two bytes a nanosecond, and 100 ns for each message."""
    assert mesh.collective(kind, size, devices, SLOW) == (wire, took)


# -- one rank --------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "head"), [(512, 2048), (4, 8)])
def test_what_is_extrapolated_is_what_the_whole_takes(rows: int, head: int) -> None:
    """With many rows a step holds most in the head, with few where it ends."""
    model, x = deep(rows, head=head)
    stack = ranks.stack_of(model)
    assert stack is model.layers
    seen = []
    for count in ranks.DEPTHS:
        with ranks.with_layers(stack, count):
            assert len(model.layers) == count
            seen.append(run(model, ((x,), {}), layer=stack[0]))
    assert len(model.layers) == LAYERS
    every = run(model, ((x,), {}), layer=stack[0])
    for name, step in every.items():
        line = ranks.line_of([each[name] for each in seen])
        assert line is not None
        predicted, real = vars(line.at(LAYERS)), vars(ranks.whole(step).at(LAYERS))
        for phase in ("forward", "backward"):
            assert predicted.pop(phase) == pytest.approx(real.pop(phase))
        assert predicted == real
    assert every[FP32].boundary == (rows * 64 * 4, "fp32")


def test_layers_that_differ_are_no_stack() -> None:
    model = Deep()
    model.layers[3].norm.eps = 1e-3
    assert ranks.stack_of(model) is None


class Bent(Deep):
    """Computes more where it has many layers, which two depths cannot show."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu() if len(self.layers) > ranks.DEPTHS[1] else x)


def test_what_is_off_the_line_is_captured_whole() -> None:
    with torch.device("meta"):
        model, x = Bent(), torch.empty(8, 64)
    found = autoamp.plan(model, x, mesh="dp=2", device="cuda:sm_90")
    assert not found.linear
    says(str(found), "captured in all its depth")
    with pytest.raises(OptionError):
        autoamp.plan(model, x, mesh="pp=2", device="cuda:sm_90")


def test_collectives_of_tensor_parallel_layers() -> None:
    """Each layer reduces twice forward; backward once for each product it splits."""
    model, call = named_model(llama(2, heads=4, vocabulary=64), sequence=16)
    with as_rank(1, 2):
        parallelized(model, 2)
        step = run(model, call, names=[FP32, AUTOCAST])
    assert not distributed.is_initialized()
    size = 16 * 64 * 4
    counts = {each: step[FP32].first.sent.count(each) for each in step[FP32].first.sent}
    # The embedding reduces too, and the head gathers its logits.
    assert counts[Sent("forward", "all-reduce", "fp32", size)] == 2 * 2 + 1
    assert counts[Sent("backward", "all-reduce", "fp32", size)] == 2 * 5 + 1
    assert counts[Sent("forward", "all-gather", "fp32", size)] == 1
    low = Sent("forward", "all-reduce", "bf16", size // 2)
    assert step[AUTOCAST].first.sent.count(low) == 2 * 2


def test_values_are_sent_as_autocast_sends_them_or_lower() -> None:
    """A rank's part is cheap to cast, and still nothing is widened before a gather."""
    name = llama(1, heads=8, vocabulary=1024)
    model, call = named_model(name, batch=4, sequence=64)
    with as_rank(0, 8):
        parallelized(model, 8)
        step = run(model, call, names=[AUTOCAST, AUTOAMP])
    for kind in ("all-gather", "all-reduce"):
        theirs, ours = (
            sum(each.size for each in step[way].first.sent if each.kind == kind)
            for way in (AUTOCAST, AUTOAMP)
        )
        assert 0 < ours <= theirs


def test_a_rank_that_cannot_be_pretended_is_refused(monkeypatch) -> None:
    with as_rank(0, 2), pytest.raises(OptionError), as_rank(0, 2):
        pass
    assert not distributed.is_initialized()
    monkeypatch.setattr(compat, "begin_fake_group", lambda *_: False)
    with pytest.raises(OptionError), as_rank(0, 2):
        pass


@pytest.mark.parametrize("styles", [{}, {"head": "by moonlight"}])
def test_models_that_cannot_be_split(styles: dict[str, str]) -> None:
    model: Any = Deep()
    model.tp_plan = styles
    with as_rank(0, 2), pytest.raises(OptionError) as raised:
        parallelized(model, 2)
    says(raised, *(styles.values() or ["no plan"]))


def test_what_does_not_divide_or_fit_is_named() -> None:
    name = "transformers:LlamaConfig(num_hidden_layers=6, hidden_size=64, vocab_size=8)"
    with pytest.raises(OptionError) as raised:
        autoamp.plan(name, mesh="tp=3", device="cuda:sm_90")
    says(raised, "num_attention_heads=32", option="tp=3")
    model, x = deep(layers=6)
    with pytest.raises(OptionError) as refused:
        autoamp.plan(model, x, mesh="pp=7", device="cuda:sm_90")
    says(refused, 6, option="pp=7")


class Split(nn.Module):
    """A block that its maker splits over two ranks; rank `odd` leaves its norm out."""

    def __init__(self, odd: int = -1) -> None:
        super().__init__()
        self.block = Block(64)
        if distributed.get_rank() == odd:
            self.block.norm = nn.Identity()  # type: ignore[assignment]
        mesh = init_device_mesh("cpu", (2,))
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self.block, mesh, styles, src_data_rank=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


def split(odd: int = -1) -> Any:
    with torch.device("meta"):
        return Split(odd), ((torch.empty(4096, 64),), {})


def test_ranks_that_part_are_named() -> None:
    found = plan.plan_of(
        lambda: split(odd=1), plan.Asked(mesh="tp=2", device="cuda:sm_90")
    )
    says([*found.notes], "rank 0", "rank 1", "op 0: forward ", ", but forward ")
    assert "All 2 ranks" not in str(found)


def test_a_factory_that_splits_its_model_itself(tmp_path, monkeypatch) -> None:
    (tmp_path / "split_net.py").write_text(
        "from tests.tools.plan.test_meshes import split\n\n\n"
        "def net():\n    model, (args, _) = split()\n    return model, args\n"
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    arguments = ["split_net:net", "--mesh", "tp=2", "--device", "cuda:sm_90"]
    result = CliRunner().invoke(
        autoamp_cli.main, ["plan", *arguments, "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text("utf-8"))
    assert written["rewritten"]
    fp32 = written["here"]["ways"][0]
    # What is halved, and what each rank has whole: the norm, and the bias of `down`.
    halved = 64 * 128 + 128 + 128 * 64
    assert fp32["stages"][0]["weights"] == 4 * (halved // 2 + 64 + 2 * 64)
    (row,) = [each for each in fp32["transfers"] if each["phase"] == "forward"]
    assert (row["kind"], row["count"]) == ("all-reduce", 1)


def test_graphs_on_dtensors_are_rewritten() -> None:
    """A rank's products are low: what is reduced forward, and what is kept, is low."""
    with torch.device("meta"), as_rank(0, 2):
        model, call = split()
        step = run(model, call)
    assert step[AUTOAMP].rewritten
    size = 4096 * 64 * 4
    low = Sent("forward", "all-reduce", "bf16", size // 2)
    for name in (AUTOCAST, AUTOAMP):
        assert [s for s in step[name].first.sent if s.phase == "forward"] == [low]
    saved = {name: each.first.saved for name, each in step.items()}
    assert saved[AUTOAMP] <= saved[AUTOCAST] < saved[FP32]


def test_a_norm_of_heads_stays_whole() -> None:
    name = llama(1, heads=4, vocabulary=64).replace("Llama", "Qwen3")
    name = name.replace("(", "(num_key_value_heads=4, head_dim=16, ")
    model, call = named_model(name, sequence=16)
    with as_rank(0, 2):
        parallelized(model, 2)
        attention: Any = model.get_submodule("model.layers.0.self_attn")
        assert not compat.is_distributed(attention.q_norm.weight)
        assert compat.is_distributed(attention.q_proj.weight)
        step = run(model, call, names=[FP32])
    # The norm sees the heads of this rank alone.
    assert any("fp32[1, 16, 2, 16]" in op for op in step[FP32].first.ops)


# -- by hand ---------------------------------------------------------------------------


def by_hand(sent: dict[Sent, int] | None = None) -> ranks.Rank:
    """Four layers: each 10 bytes of weights, and a second forward and two backward."""
    values = {"saved": 6, "low": 5, "copies": 5, "forward": 1e9, "backward": 2e9}
    peaks = {ranks.Peak("most", "end"): 30, ranks.Peak("again", "end"): 20}
    slope: dict[Any, float] = {**values, **peaks, **(sent or {})}
    at_zero = {**dict.fromkeys(slope, 0), "saved": 1, **dict.fromkeys(peaks, 3)}
    around, names = ranks.Around(4, 10, 8), (FP32, AUTOCAST, AUTOAMP)
    return ranks.Rank(
        setting=setting(),
        layers=4,
        weights=around,
        trained=around,
        steps=dict.fromkeys(names, ranks.Line(at_zero, slope)),
        boundary=dict.fromkeys(names, (10**9, "fp32")),
        rewritten=True,
        state=2.0,
        moved=0.0,
    )


def test_one_stage_by_hand() -> None:
    found = way_of(by_hand(), FP32, Mesh(), LINKS, 1)
    (stage,) = found.stages
    assert (stage.weights, stage.gradients, stage.optimizer) == (52, 52, 104)
    assert stage.peak == 52 + 104 + 4 * 30 + 3
    assert found.compute == found.seconds - found.optimizer_step == 12
    assert found.transfers == ()


def test_stages_by_hand() -> None:
    """Two stages of two layers, four micro-batches of six seconds in each stage."""
    found = way_of(by_hand(), FP32, Mesh(pp=2), LINKS, 4)
    first, last = found.stages
    assert (first.name, first.weights) == ("first", 24)
    assert (last.name, last.weights) == ("last", 28)
    assert (first.saved, last.saved) == (2 * 12, 13)
    # The first has two micro-batches under way.
    assert first.peak == 24 + 48 + 24 + (2 * 20 + 3) + 12
    assert last.peak == 28 + 56 + 28 + (2 * 20 + 3)
    assert (found.compute, found.bubble) == (24, 6)
    # A gigabyte at a byte a nanosecond goes forward, and its gradient back.
    assert found.exposed == pytest.approx(2)
    assert [(row.kind, row.count) for row in found.transfers] == [("send", 4)] * 2


def test_waiting_for_layers_and_replicas_by_hand() -> None:
    sent = {Sent("forward", "all-reduce", "bf16", 10**9): 1}
    found = way_of(by_hand(sent), FP32, Mesh(dp=2, tp=2), LINKS, 1)
    assert found.within_layers == pytest.approx(4)
    assert found.exposed == 0  # 52 bytes are reduced in less than the backward
    assert {row.axis for row in found.transfers} == {"dp", "tp"}


def test_shards_divide_what_is_held_by_hand() -> None:
    found = way_of(by_hand(), mesh.FSDP2, Mesh(dp=4), LINKS, 1)
    (stage,) = found.stages
    assert (stage.weights, stage.gradients, stage.optimizer) == (13, 13, 26)
    # Two layers of 5 bytes and the root of 12 are gathered; copies are not kept.
    gathered = 2 * 5 + 12
    assert stage.copies == gathered
    assert stage.peak == 13 + 13 + 26 + (4 * 20 + 3 - 4 * 5) + gathered
    # Three of four parts of a layer's low copy are sent for each phase of four layers.
    low = [row for row in found.transfers if row.dtype == "bf16"]
    assert [(row.kind, row.count, row.wire) for row in low] == [
        ("all-gather", 4, 4 * 5 * 3 // 4)
    ] * 2
    reduced = [row for row in found.transfers if row.kind == "reduce-scatter"]
    assert {row.count: row.wire for row in reduced} == {4: 4 * 10 * 3 // 4, 1: 9}


def test_gradients_of_replicas_by_hand() -> None:
    """A bucket of DistributedDataParallel holds at most 25 MiB."""
    large = ranks.Around(0, 15 * 2**20, 0)
    rank = replace(by_hand(), weights=large, trained=large)
    (row,) = way_of(rank, FP32, Mesh(dp=4), LINKS, 1).transfers
    assert (row.kind, row.count, row.dtype) == ("all-reduce", 3, "fp32")
    assert row.wire == 60 * 2**20 * 2 * 3 // 4
    assert row.seconds == pytest.approx(row.wire * 1e-9)


# -- the whole -------------------------------------------------------------------------

NAME = llama(6, heads=4, vocabulary=64)


@pytest.mark.slow
def test_the_command_shows_and_writes_what_python_gives(tmp_path) -> None:
    path = tmp_path / "plan.json"
    arguments = [NAME, "--mesh", "dp=4,tp=2,pp=2", "--sequence", "16"]
    arguments += ["--device", "cuda:sm_90", "--precision", "bf16"]
    result = CliRunner().invoke(
        autoamp_cli.main, ["plan", *arguments, "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    says(result.stdout, "All 2 ranks of tp")
    written = json.loads(path.read_text("utf-8"))
    assert [way["name"] for way in written["here"]["ways"]] == [*mesh.MESH_WAYS]
    assert [scale["devices"] for scale in written["scales"]] == [8, 512, 16_000]
    assert written["linear"]
    assert written["rewritten"]


def test_options_of_a_mesh_need_one() -> None:
    for command in ("plan", "explain"):
        result = CliRunner().invoke(autoamp_cli.main, [command, NAME, "--node", "4"])
        assert result.exit_code != 0
        says(result.output, option=["--node", "--mesh"])


def test_figures_have_the_weights_of_one_device() -> None:
    model, x = deep()
    found = autoamp.plan(model, x, mesh="dp=8", device="cuda:sm_90")
    one = autoamp.plan(model, x, device="cuda:sm_90")
    for name in (FP32, AUTOCAST, AUTOAMP):
        stage, way = found.way(name).fullest, one.way(name)
        assert stage.weights == way.weights
        assert stage.optimizer == way.optimizer
        assert stage.peak == way.peak
    assert isinstance(found.scales[0].ways[0].stages[0].peak, int)
