"""Convolutions with the channels last: chosen by a cut, and not seen from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.check.strides import check_strides
from autoamp.errors import VerificationError
from autoamp.graph_functions import laid_out
from autoamp.rewrite.layouts import FORMATS, LAST
from autoamp.weights.sentinels import copies_of
from tests.metrics import relative_error
from tests.small_models import converted

SIDE = 64
"""Pixels; a smaller image gains less than a change of its layout costs."""


@pytest.fixture(autouse=True)
def a_device_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    units = {torch.bfloat16: "amx_bf16"}
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)


def block(inside: int, outside: int) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two blocks with a sum around the second, a pool and a classifier: ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(3, 8), block(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x), 2)
        x = x + self.second(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a cat with what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down = block(3, 8), block(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        below = self.down(F.avg_pool2d(x, 2))
        return self.out(torch.cat((self.up(below), x), 1))


class Flattened(nn.Module):
    """A convolution whose result is read as a row, by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.row = block(3, 8), nn.Linear(8 * SIDE * SIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.image(x)
        return self.row(x.view(x.shape[0], -1))


class Depthwise(nn.Module):
    """A gated depthwise block: MobileNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(3, 12, 1)
        self.deep = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.gate, self.narrow = nn.Conv2d(12, 12, 1), nn.Conv2d(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.deep(F.relu6(self.widen(x))))
        return self.narrow(x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1))))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(3, 8, 3, padding=1), nn.Conv3d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x[:, :, None].expand(-1, -1, 5, -1, -1))))


class Shared(nn.Module):
    """One convolution twice; its weight is read again as a number."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.same = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(F.relu(self.same(F.relu(self.first(x)))))
        if not self.again:
            return x
        return F.linear(x.mean((2, 3)), self.same.weight[:, :, 1, 1])


class Checkpointed(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Sequential(*(block(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.head(self.third(x + self.second(x)).mean((2, 3)))


class Rows(nn.Module):
    """ConvNeXt: norms and linear layers read channels as rows; channels come back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 16, 2, 2)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        inside = self.norms[1](self.deep(x).permute(0, 2, 3, 1))
        inside = self.narrow(F.gelu(self.wide(inside)))
        return self.down(x + inside.permute(0, 3, 1, 2)).mean((2, 3))


class Patches(nn.Module):
    """Swin: the places of an image are rows of a sequence, which a norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x).flatten(2).transpose(1, 2))


class BothKinds(nn.Module):
    """Blocks of convolutions, and after them channels that a permutation puts last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(3, 8), block(8, 8))
        self.mix, self.last = nn.Linear(8, 8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.blocks(x), 2)
        return self.last(self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean()


class Read(nn.Module):
    """A convolution whose channels are read as rows, in one of several ways."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.image, self.read = nn.Conv2d(3, 8, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.image(x).permute(0, 2, 3, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    # the model, its convolutions that are laid out anew, and the changes of layout
    "residual": (Residual, 2, 2),
    "u-net": (UNet, 4, 2),
    "depthwise": (Depthwise, 2, 2),
    "volumes": (Volumes, 2, 2),
    "shared": (lambda: Shared(False), 3, 2),
    "checkpointed": (Checkpointed, 4, 2),
    "rows": (Rows, 2, 1),
    "patches": (Patches, 1, 1),
    "both kinds": (BothKinds, 3, 1),
}


def image(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def stepped(model: nn.Module, x: Tensor, autocast: bool = False) -> list[Tensor]:
    """The result of a training step and the gradients of the parameters."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = model(x)
    result.double().square().mean().backward()
    return [
        result.detach(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


def laid(model: nn.Module) -> tuple[int, int]:
    """The convolutions with their channels last, and the changes of layout."""
    nodes = [n for gm in autoamp.report(model).graphs for n in gm.graph.nodes]
    return (
        sum(LAST in n.meta and "conv" in str(n.target) for n in nodes),
        sum(n.target is laid_out for n in nodes),
    )


@pytest.mark.thorough(but=["shared"])
@pytest.mark.parametrize("name", MODELS)
def test_convolutions_have_their_channels_last_and_nobody_sees_it(name: str) -> None:
    make, convolutions, changes = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), image()
    keys = [*model.state_dict()]
    converted_is_as_true(model, x)
    assert laid(model) == (convolutions, changes)
    assert [*model.state_dict()] == keys
    assert all(p.is_contiguous() for p in model.state_dict().values())


def converted_is_as_true(model: nn.Module, x: Tensor) -> None:
    """Converts `model`; a step is as true as under autocast, all strides the same."""
    exact = stepped(copy.deepcopy(model).double(), x.double())
    theirs = stepped(copy.deepcopy(model), x, autocast=True)
    ours = stepped(converted(model), x)
    assert [t.stride() for t in ours] == [t.stride() for t in exact]
    errors, allowed = (
        sum(relative_error(a.double(), b) for a, b in zip(found, exact, strict=True))
        for found in (ours, theirs)
    )
    assert errors <= 1.1 * allowed


def cloned(model: nn.Module, x: Tensor, sizes: set[tuple[int, ...]]) -> int:
    """How many tensors of these sizes torch copies inside its calls in a step."""
    stepped(model, x)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profiled:
        stepped(model, x)
    clones = [e for e in profiled.events() if e.name == "aten::clone"]
    return sum(tuple(e.input_shapes[0]) in sizes for e in clones)


@pytest.mark.thorough(but=["swin"])
@pytest.mark.parametrize(
    ("make", "sizes"),
    [(Rows, {(4, 16, 16, 8), (4, 8, 16, 16)}), (Patches, {(4, 256, 8), (4, 8, 256)})],
    ids=["convnext", "swin"],
)
def test_a_norm_copies_no_rows_that_lie_in_memory(
    make: Callable[[], nn.Module], sizes: set[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model, x = make(), image()
    plain = converted(copy.deepcopy(model), unfused=["channels_last"])
    assert cloned(plain, x, sizes) >= 2
    assert cloned(converted(model), x, sizes) == 0


def test_a_convolution_of_a_users_layout_has_its_weight_in_that_layout() -> None:
    """Torch would permute it anew in the forward, and again in the backward."""
    torch.manual_seed(0)
    model, x = Residual(), image().to(memory_format=torch.channels_last)
    converted_is_as_true(model, x)
    assert laid(model) == (2, 0)
    weights = [model.first[0].weight, model.second[0].weight]
    for weight in weights:
        (low,) = (each.low for each in copies_of(weight))
        assert low.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda rows: rows.softmax(-1), id="a softmax"),
        pytest.param(lambda rows: rows * 2, id="a product"),
        pytest.param(
            lambda rows: F.layer_norm(rows, [8]) + rows, id="a norm and a sum"
        ),
        pytest.param(lambda rows: rows.flatten(0, 1), id="rows returned"),
        pytest.param(lambda rows: F.linear(rows[0, 0], rows[0, 1]), id="a weight"),
    ],
)
def test_rows_that_are_read_otherwise_lie_as_they_did(
    read: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    converted_is_as_true(Read(read), image())


class Later(nn.Module):
    """Rows that are a view of an image in torch's layout, and a copy in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.image(x)
        rows = x.permute(3, 0, 1, 2).reshape(x.shape[3], x.shape[0], -1)
        x.mul_(rows.new_tensor(3.0)).add_(torch.arange(x.shape[2])[:, None])
        return F.layer_norm(rows, rows.shape[-1:])


def test_rows_that_one_layout_copies_see_a_later_write() -> None:
    torch.manual_seed(0)
    model, x = Later(), image()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            theirs = model(x)
        ours = converted(model)(x)
    assert relative_error(ours.double(), exact) <= 1.1 * relative_error(
        theirs.double(), exact
    )


def test_the_check_sees_a_view_that_becomes_a_copy() -> None:
    class Read(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.ops.aten.permute.default(x, [3, 0, 1, 2])
            rows = torch.ops.aten.reshape.default(rows, [5, 2, 12])
            return torch.ops.aten.layer_norm.default(rows, [12])

    gm = fx.symbolic_trace(Read())
    values: dict[fx.Node, Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        args = fx.map_arg(node.args, values.__getitem__)
        image = torch.randn(2, 3, 4, 5)
        values[node] = image if node.op == "placeholder" else node.target(*args)
        node.meta["val"] = values[node]
    check_strides(gm, [], FORMATS)
    with pytest.raises(VerificationError, match=r"reshape.* shows memory"):
        check_strides(gm, ["x"], FORMATS)


def test_a_view_reads_the_layout_it_was_captured_with() -> None:
    torch.manual_seed(0)
    model, x = Flattened(), image()
    plain = stepped(converted(copy.deepcopy(model), unfused=["channels_last"]), x)
    for mine, other in zip(stepped(converted(model), x), plain, strict=True):
        assert relative_error(mine, other) < 0.02


def test_a_weight_that_is_read_otherwise_too_is_right() -> None:
    torch.manual_seed(0)
    model, x = Shared(True), image()
    exact = stepped(copy.deepcopy(model).double(), x.double())
    for mine, true in zip(stepped(converted(model), x), exact, strict=True):
        assert relative_error(mine.double(), true) < 0.03
        assert mine.stride() == true.stride()


@pytest.mark.thorough
def test_copies_are_refreshed_after_a_step_and_permuted_by_it() -> None:
    torch.manual_seed(0)
    model, x = Residual(), image()
    plain = copy.deepcopy(model)
    converted(model), converted(plain, unfused=["channels_last"])
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            stepped(each, x)
            optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.stride() == other.stride()
        assert relative_error(mine, other) < 0.02
    calls = [n for gm in autoamp.report(model).graphs for n in gm.graph.nodes]
    assert not any(n.name.endswith("weight_bf16") for n in calls)


def test_weights_that_are_swapped_are_copied_again() -> None:
    torch.manual_seed(0)
    model, other, x = Residual().eval(), Residual().eval(), image()
    converted(model)
    with torch.no_grad():
        model(x)
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.data = new.data.clone()
        assert relative_error(model(x), other(x)) < 0.02
    assert laid(model) == (2, 2)


def test_training_and_inference_share_a_weight_in_both_layouts() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 3, 3, 3))

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(F.relu(F.conv2d(x, self.weight)[:, :3]), self.weight)

    one, two, x = Own(), Own(), image()
    converted(one), converted(two, fuse=False)
    for _ in range(2):
        expected = F.conv2d(F.relu(F.conv2d(x, weight)[:, :3]), weight)
        assert relative_error(one(x), expected) < 0.03
        assert relative_error(two(x), expected) < 0.03
        with torch.no_grad():
            weight.mul_(1.5)


@pytest.mark.thorough
def test_a_batch_of_another_size_is_laid_out_too() -> None:
    model = converted(Residual())
    plain = autoamp.revert(copy.deepcopy(model))
    for batch in (4, 6, 7):
        given = image(batch)
        assert relative_error(model(given), plain(given)) < 0.05
    assert laid(model) == (4, 4)  # one graph for 4, one for any other number


def test_a_weight_larger_than_its_images_stays_as_it_was() -> None:
    """Its copy and its gradient would be permuted at each step of a training."""
    small = nn.Sequential(nn.AvgPool2d(16), nn.Conv2d(8, 1024, 3))
    model = converted(nn.Sequential(block(3, 8), block(8, 8), small))
    model(image())
    assert laid(model) == (2, 2)


def test_a_layout_of_the_users_is_left_alone() -> None:
    model = Residual().to(memory_format=torch.channels_last)
    converted(model)(image().to(memory_format=torch.channels_last))
    assert laid(model) == (0, 0)


def test_a_device_that_gains_nothing_keeps_its_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    model = converted(Residual())
    model(image())
    assert laid(model) == (0, 0)


def test_the_report_says_it() -> None:
    model = converted(Residual())
    model(image())
    report = autoamp.report(model)
    assert "9 ops run with channels last (2 changes of layout)." in str(report)
    assert "layout     channels last" in report.why("conv2d")


@pytest.mark.thorough
def test_the_report_counts_the_copies_of_both_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = converted(nn.Sequential(block(3, 8), block(8, 8)))
    model(image())
    first = autoamp.report(model).cast_counts
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    with torch.no_grad():
        model(image())  # a graph of its own, with no layout of its own
    both = autoamp.report(model).cast_counts
    held = [copy.low for p in model.parameters() for copy in copies_of(p)]
    assert both.kept == first.kept
    assert both.kept_bytes == sum(low.nbytes for low in held) > first.kept_bytes


def test_a_hook_sees_the_layout_of_the_model() -> None:
    model, seen = Residual(), []
    model.first.register_forward_hook(
        lambda _, __, result: seen.append(result.stride())
    )
    model(image())
    converted(model)(image())
    assert seen[0] == seen[-1]


def permuted(model: nn.Module, x: Tensor) -> list[tuple[torch.dtype, int]]:
    """The dtype and the elements of each value whose layout a step changes."""
    stepped(model, x)
    return [
        (n.meta["val"].dtype, n.meta["val"].numel())
        for gm in autoamp.report(model).graphs
        for n in gm.graph.nodes
        if n.target is laid_out
    ]


def test_an_image_without_a_gradient_is_permuted_after_its_cast() -> None:
    """Permuted in fp32, the image would move twice the bytes."""
    model, x = converted(Residual()), image()
    assert permuted(model, x)[0] == (torch.bfloat16, x.numel())


def test_an_image_with_a_gradient_is_permuted_low_in_both_directions() -> None:
    model, x = converted(Residual()), image().requires_grad_()
    assert permuted(model, x)[0] == (torch.bfloat16, x.numel())
    assert x.grad is not None
    assert x.grad.is_contiguous()
