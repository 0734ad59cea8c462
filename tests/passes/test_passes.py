"""Every pass that edits a graph is checked, and spares what its check refuses.

The list of passes is walked, so that a pass that is added without a check, or whose
check sees none of the faults planted here, fails.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.errors import AutoampError
from tests.metrics import relative_error
from tests.one_rank import one_rank
from tests.passes.texts import (
    PASSES,
    Checks,
    Device,
    Pass,
    Phase,
    Rewritten,
    copied,
    run,
)
from tests.quick import some_slow

ATEN = torch.ops.aten
WIDTH, HEADS, LENGTH = 16, 2, 6


class Everything(nn.Module):
    """A program that each pass finds something in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(3, 64, 3, padding=1)
        self.image_2 = nn.Conv2d(64, WIDTH, 3, padding=1)
        self.each = nn.Conv2d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.enter = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, image: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.each(self.image_2(self.image(image).relu())).mean((2, 3))
        parts = self.enter(x + seen[:, None]).unflatten(-1, (3, WIDTH))
        q, k, v = (parts.select(-2, at) for at in range(3))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        angles = torch.arange(LENGTH)[:, None] / torch.arange(1, 5)
        angles = torch.cat((angles, angles), -1)
        q, k = (
            t * angles.cos() + torch.cat((-t[..., 4:], t[..., :4]), -1) * angles.sin()
            for t in (q, k)
        )
        y = functional.scaled_dot_product_attention(q, k, v)
        y = self.inner(y.transpose(1, 2).flatten(2))
        y = y * (1 + torch.erf(y / 2**0.5)) / 2
        e = (y - y.amax(-1, keepdim=True)).exp()
        y = self.norm(self.inner(e / e.sum(-1, keepdim=True)))
        z = self.leave(y)
        return z, z.square().mean()


class InBodies(nn.Module):
    """A program whose rows are added up, and multiplied in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, _: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.enter(x).relu().float()
        y = torch.zeros_like(rows).index_add(1, torch.arange(LENGTH) // 2, rows)
        z = checkpoint(self.inner, y.square(), use_reentrant=False)
        return z, z.square().mean()


class OnMesh(nn.Module):
    """A program on DTensors: a part is normed, gathered, read and handed on."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = parallelize_module(up, mesh, ColwiseParallel())
        self.down = parallelize_module(down, mesh, RowwiseParallel())
        self.mesh = mesh

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        part = DTensor.from_local(normed, self.mesh, (Shard(1),))
        again = DTensor.from_local(normed, self.mesh, (Shard(1),)).square()
        y = self.up(part.redistribute(placements=(Replicate(),))).relu()
        y = y + again.redistribute(placements=(Replicate(),)).to_local()
        z = self.down(y)
        return z, z.square().mean()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(1, 3, 32, 32), torch.randn(1, LENGTH, WIDTH)


@pytest.fixture(autouse=True)
def _a_device_on_which_every_pass_pays(
    bf16_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "channels_last", True)
    monkeypatch.setattr(Device, "starts_kernels", True)
    monkeypatch.setattr(Device, "keeps_sums", True)
    monkeypatch.setattr("autoamp.passes.decide.sums.PYTHON_NS", 0.0)


EDITING = [each for each in PASSES if each.check is not None]
IN_TESTS = (Checks.replaced, Checks.bound)
"""Checks that tests extend by numbers, and by the ops that are called."""

CHECKED = [each for each in EDITING if each.check not in IN_TESTS]


def named(each: Any) -> str:
    return each.name if isinstance(each, Pass) else each.__name__


# -- faults, each of which edits the graph that a pass gives --------------------------


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def another_operand(gm: fx.GraphModule, is_new: Callable[[fx.Node], bool]) -> bool:
    """A call, of the new ones if there is one, reads another value of the same kind."""
    return _other_operand(gm, is_new) or _other_operand(gm, lambda _: True)


def _other_operand(gm: fx.GraphModule, is_wanted: Callable[[fx.Node], bool]) -> bool:
    known: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        for operand in node.all_input_nodes if is_wanted(node) else ():
            other = known.get(kind(operand))
            if other is None or other is operand or other in operand.all_input_nodes:
                continue  # a copy is the value that it is of
            node.replace_input_with(operand, other)
            return True
        if kind(node) is not None and node.op != "get_attr":
            known.setdefault(kind(node), node)
    return False


def kind(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    return value.dtype, value.shape, value.stride()


def one_call_less(gm: fx.GraphModule, is_new: Callable[[fx.Node], bool]) -> bool:
    """A call that stays is gone; its readers read its operand."""
    for node in calls(gm):
        operands = node.all_input_nodes
        if node.target in (ATEN.relu.default, ATEN.square.default) and operands:
            node.replace_all_uses_with(operands[0])
            gm.graph.erase_node(node)
            return True
    return False


def another_function(gm: fx.GraphModule, is_new: Callable[[fx.Node], bool]) -> bool:
    for node in calls(gm):
        if node.target in (ATEN.relu.default, torch.relu):
            node.target = ATEN.sigmoid.default
            return True
    return False


def another_number(gm: fx.GraphModule, is_new: Callable[[fx.Node], bool]) -> bool:
    for node in calls(gm):
        for at, value in enumerate(node.args):
            if isinstance(value, list) and value == [2, 3]:
                node.update_arg(at, [3])
                return True
    return False


def one_result_for_another(
    gm: fx.GraphModule, is_new: Callable[[fx.Node], bool]
) -> bool:
    output = gm.graph.output_node()
    (results,) = output.args
    if not isinstance(results, (tuple, list)) or len(results) < 2:
        return False
    output.args = ((results[1], *results[1:]),)
    return True


FAULTS = [
    another_operand,
    one_call_less,
    another_function,
    another_number,
    one_result_for_another,
]


def planted(each: Pass, fault: Callable[..., bool], hit: list[bool]) -> Pass:
    """The pass with a fault in the graph that it gives, until a region is spared."""

    @functools.wraps(each.run)
    def faulty(work: Rewritten) -> Rewritten:
        now = each.run(work)
        if work.given_up or work.left:
            return now
        if each.name == "clean up" and now is not work:
            # Where nothing is idle, the pass gives the graph that it was given.
            now = dataclasses.replace(now, gm=copied(now.gm)[0])
        gm = now.code if each.name in ("bindings", "for compilers") else now.gm
        if gm is None or gm is work.gm:
            return now
        before = {(n.name, n.target) for n in work.gm.graph.nodes}
        hit.append(fault(gm, lambda n: (n.name, n.target) not in before))
        return now

    return dataclasses.replace(each, run=faulty)


@functools.cache
def captured(each: Pass) -> Rewritten:
    """The work on a program as the list of passes gets it."""
    options: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
    options["objective"] = "memory" if each.name == "made again" else "time"
    if each.name in ("edge", "for compilers"):
        options["loss_scale"] = 128.0
    if each.name == "for compilers":
        options["backend"] = lookup_backend("aot_eager")
    seen: list[Rewritten] = []
    real = run._run

    def spied(work: Rewritten, *given: Any) -> Rewritten:
        seen.append(work)
        return real(work, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_run", spied)
        with contextlib.ExitStack() as stack:
            model, given = program(stack, each.name)
            autoamp.convert(model, **options, strict=True)(*given)
    return seen[-1]


MESHED = ("calls once", "gathers", "meshes")
"""The passes that find something in a graph on DTensors alone."""


IN_BODIES = ("low inputs", "index adds")


def program(stack: contextlib.ExitStack, name: str) -> tuple[nn.Module, Any]:
    """A program for a pass, and the arguments of a call of it."""
    if name not in MESHED:
        return InBodies() if name in IN_BODIES else Everything(), data()
    return OnMesh(stack.enter_context(one_rank())), data()[1:]


def up_to(each: Pass, instead: Pass) -> list[Pass]:
    """The list of passes up to `each`, with `instead` in its place.

    The check of `clean up` is the check of `casts` as well.
    """
    at = PASSES.index(each)
    after = [p for p in PASSES[at + 1 :] if p.phase is each.phase is Phase.WRITE]
    return [*PASSES[:at], instead, *after]


@pytest.mark.parametrize("each", PASSES, ids=named)
def test_a_pass_that_edits_has_a_check(each: Pass) -> None:
    sees = ("kernels", "calls once")
    edits = each.phase in (Phase.WRITE, Phase.PREPARE) or each.name in sees
    assert edits == (each.check is not None)
    assert len(each.run.__doc__ or "") > 20


@pytest.mark.usefixtures("numbers_may_differ")
@pytest.mark.parametrize("each", EDITING, ids=named)
def test_planted_faults_are_refused(each: Pass) -> None:
    """Each fault that fits a pass, planted in the graph that the pass gives.

    Faults that numbers show are refused by `check/numbers.py` of these tests.
    """
    found = 0
    for fault in FAULTS:
        hit: list[bool] = []
        try:
            listed = up_to(each, planted(each, fault, hit))
            run._run(captured(each), max(each.phase, Phase.WRITE), listed)
        except AutoampError:
            refused = True
        else:
            refused = False
        assert hit, f"{each.name} edits nothing: no fault in it could be seen"
        assert refused == any(hit), fault.__name__
        found += any(hit)
    assert found >= 3


@pytest.mark.parametrize(
    "each",
    some_slow(CHECKED, lambda p: p.name not in ("hoist", "layouts")),
    ids=named,
)
def test_a_fault_costs_a_region_and_no_number(each: Pass, monkeypatch) -> None:
    """A pass that is broken is spared or planned anew: its graph stays converted."""
    broken = planted(each, another_function, [])
    listed = tuple(broken if p is each else p for p in PASSES)
    monkeypatch.setattr(run._run, "__defaults__", (listed, *run._run.__defaults__[1:]))
    options: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
    options["objective"] = "memory" if each.name == "made again" else "time"
    if each.name == "edge":
        options["loss_scale"] = 128.0
    if each.name == "for compilers":
        options["backend"] = lookup_backend("aot_eager")
        options["loss_scale"] = 128.0
    with contextlib.ExitStack() as stack:
        made, given = program(stack, each.name)
        truth = [*step(copy.deepcopy(made), given)]
        model = autoamp.convert(made, **options, strict=False)
        for found, true in zip(step(model, given), truth, strict=True):
            assert relative_error(whole(found), whole(true)) < 0.1
    told = [why for _, why in autoamp.report(model).skipped]
    assert any("please report" in why and each.without in why for why in told), told


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def step(model: nn.Module, given: Any) -> Iterator[Tensor]:
    model.zero_grad()
    results = model(*given)
    (results[0].sum() + results[1]).backward()
    yield from results
    yield from (p.grad for p in model.parameters() if p.grad is not None)
