"""Results have the strides of the fp32 model's, and `as_strided` reads the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.metrics import relative_error
from tests.says import says
from tests.small_models import Of, converted

Step = tuple[str, Callable[[Tensor], Tensor]]


class Program(nn.Module):
    """Products, each followed by views and a few other ops; each result is returned."""

    def __init__(self, images: bool, steps: Sequence[Sequence[Step]]) -> None:
        super().__init__()
        made = (
            nn.Conv2d(
                4, 6, (1, 3, 3)[i % 3], padding=(0, 1, 1)[i % 3], groups=1 + i % 2
            )
            if images
            else nn.Linear(8, 8)
            for i in range(len(steps))
        )
        self.products, self.steps = nn.ModuleList(made), steps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for product, steps in zip(self.products, self.steps, strict=True):
            value = product(x)
            for _, step in steps:
                value = step(value)
            found.append(value)
        return tuple(found)


def a_step(value: Tensor, dice: random.Random) -> Step:
    """A view of `value`, or another op on it; the name tells a failure's reader."""
    at, to = (dice.randrange(value.dim()) for _ in range(2))
    size = value.shape[at]
    start = dice.randrange(size)
    length = dice.randint(1, size - start)
    by = dice.randint(1, 3)
    choices: list[Step] = [
        (f"narrow({at}, {start}, {length})", lambda v: v.narrow(at, start, length)),
        (f"transpose({at}, {to})", lambda v: v.transpose(at, to)),
        (f"unsqueeze({at})", lambda v: v.unsqueeze(at)),
        (f"every({at}, {by})", lambda v: v.unfold(at, 1, by).squeeze(-1)),
        (f"relu({at})", torch.relu),
        ("contiguous", lambda v: v.contiguous()),
        (f"flip({at})", lambda v: v.flip(at)),
        (f"chunk({at})", lambda v: v.chunk(2, at)[0]),
        ("doubled", lambda v: v * 2),
        ("in place", lambda v: v.mul_(2)),
        ("denied", lambda v: v.exp()),
    ]
    if value.dim() > 1:
        choices += [
            (f"select({at}, {start})", lambda v: v.select(at, start)),
            (f"unbind({at})", lambda v: v.unbind(at)[start]),
        ]
        if at != to:
            choices.append((f"diagonal({at}, {to})", lambda v: v.diagonal(0, at, to)))
    if size == 1:
        choices.append((f"expand({at})", lambda v: wider(v, at)))
        choices.append((f"squeeze({at})", lambda v: v.squeeze(at)))
    else:
        choices.append((f"expanded({at})", lambda v: wider(v.unsqueeze(at), at)))
    return dice.choice([c for c in choices if c[0] != "squeeze" or value.dim() > 1])


def wider(value: Tensor, at: int) -> Tensor:
    """Three times the one element of dimension `at`, in one place of memory."""
    return value.expand([3 if i == at else -1 for i in range(value.dim())])


def steps_for(value: Tensor, dice: random.Random) -> list[Step]:
    found: list[Step] = []
    for _ in range(dice.randint(1, 4)):
        step = a_step(value, dice)
        try:
            value = step[1](value.clone() if step[0] == "in place" else value)
        except RuntimeError:  # a write to elements that share memory
            continue
        if value.numel():
            found.append(step)
    return found


def program(seed: int, images: bool) -> tuple[Program, Tensor]:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    x = torch.randn(2, 4, 5, 5) if images else torch.randn(4, 8)
    if images and seed % 2:
        x = x.to(memory_format=torch.channels_last)
    made = nn.Conv2d(4, 6, 1)(x) if images else x
    steps: list[list[Step]] = []
    while len(steps) < 10:
        fresh = steps_for(made.detach(), dice)
        trial = Program(images, [fresh])
        try:
            trial(x)[0].sum().backward()
        except RuntimeError:  # a value that the backward needs is written to
            continue
        steps.append(fresh)
    return Program(images, steps), x


def strides(value: Tensor) -> list[int]:
    """The strides that tell elements apart."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return [stride for size, stride in pairs if size != 1]


def writable(value: Tensor) -> bool:
    try:
        with torch.no_grad():
            value.add_(1)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_results_have_the_strides_of_fp32(
    precision: str, images: bool, seed: int
) -> None:
    model, x = program(seed, images)
    expected = model(x)
    amp = autoamp.convert(copy.deepcopy(model), precision=precision, do_no_harm=False)
    found = amp(x)
    assert autoamp.report(amp).coverage.low_flops
    for mine, true, steps in zip(found, expected, model.steps, strict=True):
        said = " ".join(name for name, _ in steps)
        assert strides(mine) == strides(true), said
        assert relative_error(mine, true) < 0.1, said
        assert writable(mine) == writable(true), said
    sum(t.sum() for t in amp(x)).backward()
    assert all(p.grad is not None for p in amp.parameters())


def strided(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reads elements of a view by their places in memory, and in another way."""
    every = m.fc(x)[:, 1::2]
    return every.exp(), every.as_strided((3, 3), (8, 2), 3).exp()


def returned(m: Any, x: Tensor) -> tuple[Tensor]:
    return (m.fc(x).t()[1:4],)


@pytest.mark.parametrize("program", [strided, returned])
def test_the_verifier_finds_other_strides(
    program: Callable[..., tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pins the check fails, and the pass keeps what it names in fp32."""
    monkeypatch.setattr("autoamp.passes.decide.classify.held_by_strides", lambda *_: {})
    model, x = Of(program, fc=nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(autoamp.errors.AutoampError) as raised:
        converted(copy.deepcopy(model))(x)
    says(raised, "strides")
    expected = model(x)
    found = converted(model, strict=False)(x)
    for mine, true in zip(found, expected, strict=True):
        assert mine.stride() == true.stride()
        assert relative_error(mine, true) < 0.02


def test_the_report_says_why() -> None:
    model = converted(Of(returned, fc=nn.Linear(8, 8)))
    model(torch.randn(4, 8))
    says(autoamp.report(model).why("slice_1"), "returned with gaps")
