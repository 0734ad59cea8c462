"""Programs that compute on DTensors, and a loop that trains each on one rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.distributed.training import WIDE, WIDTH, Block, Net
from tests.small_models import BF16

PLANS: dict[str, dict[str, Any]] = {
    "columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequences": {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    },
}
"""How the linears of a block lie on the mesh; "sequences" also shards the rows."""


@dataclass
class Program:
    """A model that computes on DTensors, and how it is trained.

    Attributes:
        inputs: one for each step; the first is used for inference too.
        loss: the loss of a result and its input.
        region: the region that calls and backwards are made in.
    """

    model: nn.Module
    inputs: Sequence[Any]
    loss: Callable[[Any, Any], Tensor]
    region: Callable[[], Any] = contextlib.nullcontext


@dataclass
class Ran:
    """What one rank saw of a training.

    Attributes:
        losses, skipped: one entry a step.
        weights: one number of each parameter, at the end.
        result: one number of a call without gradients, at the end.
        left: why parts of the model were not converted.
        share: the share of the products' flops that ran low.
        sent: the bytes that the last step sent.
    """

    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    result: float = 0.0
    left: list[str] = field(default_factory=list)
    share: float = 0.0


def run(
    rank: int,
    world: int,
    program: str,
    mixed: str,
    *,
    bad: dict[int, int] | None = None,
    **options: Any,
) -> Ran:
    """Trains a program for one step an input.

    Args:
        mixed: "no", "autocast" (in bf16) or "ours".
        bad: the steps whose gradients overflow, each to the rank on which they do.
    """
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    made = PROGRAMS[program](mesh)
    if mixed == "ours":
        autoamp.convert(made.model, **{**BF16, **options})
    adam = torch.optim.AdamW(made.model.parameters(), 1e-2, foreach=False)
    ran = Ran()
    region = _regions(made, mixed)
    for step, given in enumerate(made.inputs):
        with made.region():
            with region():
                loss = made.loss(made.model(given), given)
            is_bad = (bad or {}).get(step) == rank
            (loss * math.inf if is_bad else loss).backward()
        adam.step()
        adam.zero_grad()
        ran.losses.append(float(_whole(loss)))
        ran.skipped.append(bool(getattr(adam, "step_was_skipped", False)))
    made.model.eval()
    with torch.no_grad(), made.region(), region():
        ran.result = float(_whole(made.model(made.inputs[0])).double().sum())
    ran.weights = [float(_whole(p).double().sum()) for p in made.model.parameters()]
    if mixed == "ours":
        report = autoamp.report(made.model)
        ran.left = [why for _, why in report.skipped]
        ran.share = report.coverage.low_flops / max(report.coverage.flops, 1)
    return ran


def _regions(made: Program, mixed: str) -> Callable[[], Any]:
    if mixed == "autocast":
        return lambda: torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext


def _whole(value: Any) -> Tensor:
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _rows(*counts: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=made) for rows in counts or (8,) * 4]


def _tokens(*shape: int, words: int = 16) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(0, words, shape, generator=made) for _ in range(4)]


def _error(y: Any, x: Any) -> Tensor:
    loss = ((y - x[:, :4]) ** 2).mean()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _in_parts(net: Net, mesh: Any) -> Net:
    for block in net.blocks:
        parallelize_module(block, mesh, PLANS["columns and rows"])
    return net


class Checkpointed(nn.Module):
    """A net whose blocks are run again in the backward."""

    def __init__(self, mesh: Any, *, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = _in_parts(Net(), mesh), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.first(x)
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.net.last(x)


class Stream(nn.Module):
    """Blocks on an fp32 stream, whose rows the ranks share between the linears."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDE, 4)
        for block in self.blocks:
            parallelize_module(block, mesh, PLANS["sequences"])
        rows = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(0),)}
        first = PrepareModuleInput(**rows, use_local_output=True)
        parallelize_module(self.blocks[0], mesh, first)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, WIDE // WIDTH)
        for block in self.blocks:
            x = block(x)
        part = DTensor.from_local(x, self.mesh, (Shard(0),), run_check=False)
        return self.last(part.redistribute(placements=(Replicate(),)).to_local())


class Uneven(nn.Module):
    """Seven columns on two ranks, between which DTensors are handed on."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, 4)
        columns = ColwiseParallel(use_local_output=False)
        parallelize_module(self, mesh, {"a": columns, "b": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Words(nn.Module):
    """Words in, words out: the table of words and the head are sharded by words."""

    def __init__(self, mesh: Any, *, own_loss: bool) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(16, WIDE), nn.Linear(WIDE, 16)
        self.up, self.down = nn.Linear(WIDE, 64), nn.Linear(64, WIDE)
        self.own_loss = own_loss
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        plan = {"emb": RowwiseParallel(input_layouts=Replicate()), "head": head}
        parallelize_module(self, mesh, {**plan, **PLANS["columns and rows"]})

    def forward(self, words: Tensor) -> Any:
        x = self.emb(words)
        scores = self.head(x + self.down(torch.relu(self.up(x))))
        return nn.functional.cross_entropy(scores, words) if self.own_loss else scores


class Llama(nn.Module):
    """A Llama of transformers, whose attention sees a rank's own heads.

    Where `sequences` are in parts, the ranks share the tokens between the linears.
    """

    def __init__(
        self, mesh: Any, *, sequences: bool = False, config: Any = None
    ) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"num_hidden_layers": 2, "num_attention_heads": 4}
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
        small = LlamaConfig(vocab_size=32, **shape, **sizes)
        self.llama = LlamaForCausalLM(config or small)
        for layer in self.llama.model.layers:
            parallelize_module(layer, mesh, _layer_plan(sequences=sequences))
        if sequences:
            rows = {"input_layouts": (Replicate(),)}
            wanted = {"desired_input_layouts": (Shard(1),), "use_local_output": True}
            first = PrepareModuleInput(**rows, **wanted)
            parallelize_module(self.llama.model.layers[0], mesh, first)
            head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
            parallelize_module(
                self.llama, mesh, {"model.norm": SequenceParallel(), "lm_head": head}
            )

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.llama(input_ids=words, use_cache=False).logits
        return scores


def _layer_plan(*, sequences: bool) -> dict[str, Any]:
    """How the modules of a layer of Llama lie on the mesh."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    if not sequences:
        return plan | {name: RowwiseParallel() for name in rows}
    norms = ("input_layernorm", "post_attention_layernorm")
    whole = {"hidden_states": Replicate()}
    part = {"hidden_states": Shard(1)}
    return {
        **plan,
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in rows},
        **{name: SequenceParallel() for name in norms},
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=part, desired_input_kwarg_layouts=whole
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
    }


class Pictures(nn.Module):
    """A convolution and dropout of plain tensors before linears of DTensors."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        parallelize_module(self, mesh, PLANS["columns and rows"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu().mean((2, 3))
        return self.down(self.drop(self.up(x).relu()))


def _all_dtensors(mesh: Any) -> Program:
    """Inputs, weights and results are DTensors."""

    def shard(_: str, module: nn.Module, mesh: Any) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            where = [Shard(0)] if p.dim() == 2 else [Replicate()]
            part = nn.Parameter(distribute_tensor(p.data, mesh, where))
            module.register_parameter(name, part)

    net = distribute_module(Net(), mesh, shard)
    given = [distribute_tensor(x, mesh, [Replicate()]) for x in _rows()]
    return Program(net, given, _error)


def _next_word(scores: Tensor, words: Tensor) -> Tensor:
    before, after = scores[:, :-1].flatten(0, 1), words[:, 1:].flatten()
    return nn.functional.cross_entropy(before, after)


def _of_words(mesh: Any, *, own_loss: bool) -> Program:
    def loss(result: Any, words: Tensor) -> Tensor:
        return result if own_loss else nn.functional.cross_entropy(result, words)

    return Program(Words(mesh, own_loss=own_loss), _tokens(12), loss, loss_parallel)


def _pictures() -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=made) for _ in range(4)]


PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "columns and rows": lambda mesh: Program(_in_parts(Net(), mesh), _rows(), _error),
    "sequences": lambda mesh: Program(Stream(mesh), _rows(), _error),
    "checkpointed": lambda mesh: Program(
        Checkpointed(mesh, reentrant=False), _rows(), _error
    ),
    "checkpointed, reentrant": lambda mesh: Program(
        Checkpointed(mesh, reentrant=True), _rows(), _error
    ),
    "other sizes": lambda mesh: Program(
        _in_parts(Net(), mesh), _rows(8, 6, 10, 4), _error
    ),
    "uneven": lambda mesh: Program(Uneven(mesh), _rows(), _error),
    "all DTensors": _all_dtensors,
    "loss of the script": lambda mesh: _of_words(mesh, own_loss=False),
    "loss of the model": lambda mesh: _of_words(mesh, own_loss=True),
    "Llama": lambda mesh: Program(Llama(mesh), _tokens(2, 12, words=32), _next_word),
    "Llama, sequences": lambda mesh: Program(
        Llama(mesh, sequences=True), _tokens(2, 12, words=32), _next_word
    ),
    "pictures": lambda mesh: Program(
        Pictures(mesh), _pictures(), lambda y, _: (y**2).mean()
    ),
}
