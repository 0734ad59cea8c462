"""The accuracy law for one spelling on one kind of data.

Of the output, of what is written, and of the gradients of the input and of each
parameter (those of queries, keys and values apart, though one product makes them): the
error's Euclidean norm, against the same model in float64, is at most 1.1 times that
under `torch.autocast`, or that of fp32 if it is the larger, or that of float64 where
what the layer gets and gives is rounded to 16 bits, once and correctly: no graph whose
products run low can be better than this.  (Autocast can, by chance that has a reason:
halves of numbers below fp16's normal range fall to either side, and SiLU's do not.)

Errors are set in relation to the norm of the truth, or of the gradient of the whole
parameter of which they are a part, so that a gradient that is truly 0 (a key's bias)
has its size compared with autocast's.  The only floor is one rounding to fp32 of that
norm.  Numbers that are not finite in float64, in fp32 or under autocast are left out;
those that are finite there must be so in ours.

Two errors of one draw of the data are two draws of chance.  Root mean squares over four
draws must break the law, and then those over each of `GROUPS` groups of eight others.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import autoamp
from tests.spelled.data import Situation
from tests.spelled.layers import WIDTH, Layer, Spelling

LIMIT = 1.1
TINY = torch.finfo(torch.float32).eps / 2
"""One rounding to fp32."""

FIRST, GROUP, GROUPS = 4, 8, 4
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = tuple(2.0**k for k in (8, 0, -8, -16))
"""Of fp16's loss: the largest is taken that autocast's gradients survive."""

Tensors = dict[str, Tensor]
Errors = dict[str, tuple[float, float]]
"""Our error and the largest that is allowed, by the name of a tensor."""


DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}


class Exact(TorchFunctionMode):
    """What asks for fp32 gets float64; random numbers are those that fp32 draws."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        kwargs = kwargs or {}
        if func in DRAWS and kwargs.get("dtype") in (None, torch.float32):
            return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        if func is torch.nn.functional.dropout:
            kept = torch.ones_like(args[0], dtype=torch.float32)
            return args[0] * func(kept, *args[1:], **kwargs).double()
        args, kwargs = pytree.tree_map(
            lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs)
        )
        return func(*args, **kwargs)


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def run(model: Any, x: Tensor, cotangent: Tensor, context: Any) -> Tensors:
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with context:
        output = model(x)
    found = {"output": output.detach()}
    cotangent = cotangent.flatten()[: output.numel()].view(output.shape)
    with exactly() if x.dtype == torch.float64 else contextlib.nullcontext():
        output.backward(cotangent.to(output.dtype))
    for name, leaf in (("input", x), *model.named_parameters()):
        if leaf.grad is not None:
            found[f"gradient of {name}"] = leaf.grad.detach()
    return found


def split(found: Tensors, parts: int) -> Iterator[tuple[str, str, Tensor]]:
    """Each tensor that is compared: its name, that of the whole, and its numbers."""
    for whole, tensor in found.items():
        if not whole.startswith("gradient of before") or parts == 1:
            yield whole, whole, tensor.double()
            continue
        for letter, piece in zip("qkv", tensor.double().split(WIDTH), strict=False):
            yield f"{whole} ({letter})", whole, piece


def norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


class RefusedError(Exception):
    """Autocast cannot run it: there is nothing to be held against."""


@dataclass
class Subject:
    """A spelling as it is converted for one kind of data."""

    spelling: Spelling
    situation: Situation
    precision: str
    options: dict[str, Any] = field(default_factory=dict)
    ours: Any = None

    def errors(self, seed: int) -> Errors:
        """All that is compared, from one draw of the data."""
        model, x, cotangent = self.situation.made(self.spelling, seed)
        theirs, scale = self.autocast(model, x, cotangent)
        plain = run(model, x, cotangent * scale, contextlib.nullcontext())
        wide = copy.deepcopy(model).double()
        given = x.double(), cotangent.double() * scale
        true = run(wide, *given, exactly())
        wide.edge = LOW[self.precision]
        best = run(wide, *given, exactly())
        ours = self.run_ours(model, x, cotangent * scale)
        return compared(true, (plain, theirs, best), ours, self.spelling.parts)

    def autocast(
        self, model: Layer, x: Tensor, cotangent: Tensor
    ) -> tuple[Tensors, float]:
        """Autocast's results, and the scale of the loss that all get."""
        found: Tensors = {}
        for scale in SCALES if self.precision == "fp16" else (1.0,):
            context = torch.autocast("cpu", LOW[self.precision])
            try:
                found = run(model, x, cotangent * scale, context)
            except Exception as error:
                raise RefusedError(str(error)) from error
            if all(t.isfinite().all() for t in found.values()):
                return found, scale
        return run(model, x, cotangent, context), 1.0

    def run_ours(self, model: Layer, x: Tensor, cotangent: Tensor) -> Tensors:
        if self.ours is None:
            torch._dynamo.reset()
            options = {"do_no_harm": False, "strict": True, "loss_scale": "off"}
            self.ours = autoamp.convert(
                copy.deepcopy(model),
                **{"precision": self.precision, **options, **self.options},
            )
        else:
            self.ours.load_state_dict(model.state_dict())
        return run(self.ours, x, cotangent, contextlib.nullcontext())

    def kernels(self) -> list[str]:
        """What chains of the layer run as."""
        return [op.kernel for op in autoamp.report(self.ours).ops if op.kernel]


def strides(tensor: Tensor) -> list[int]:
    """Those that say anything: not where there is one number."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


def compared(
    true: Tensors, others: tuple[Tensors, ...], ours: Tensors, parts: int
) -> Errors:
    """The errors, in relation to the norm of the truth.

    `others` are fp32's, autocast's, and the truth's with rounded edges.
    """
    plain, theirs, best = others
    if strides(ours["output"]) not in map(strides, (plain["output"], theirs["output"])):
        raise AssertionError("the output has other strides than in fp32")
    pieces = [
        {name: tensor for name, _, tensor in split(found, parts)}
        for found in (ours, plain, theirs, best)
    ]
    errors = {}
    for name, whole, exact in split(true, parts):
        found = error(
            exact, [p[name] for p in pieces], norm(finite(true[whole].double()))
        )
        if found is not None:
            errors[name] = found
    return errors


def finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def error(
    exact: Tensor, ends: list[Tensor], size: float | None = None
) -> tuple[float, float] | None:
    """Our error and the largest allowed; None where no number is finite.

    Args:
        ends: ours, fp32's, autocast's, and others that ours may be as wrong as.
        size: what errors are set in relation to; the norm of the truth if None.
    """
    known = torch.stack([t.isfinite() for t in (exact, *ends[1:3])]).all(0)
    if not known.any():
        return None
    size = (norm(finite(exact)) if size is None else size) or 1.0
    off = [norm((t - exact)[known]) / size for t in ends]
    mine, single, amp, *others = (e if math.isfinite(e) else math.inf for e in off)
    return mine, max(single, amp, *(e for e in others if math.isfinite(e)))


def mean_squares(draws: list[Errors]) -> Errors:
    """Roots of the mean squares, of what is in every draw."""
    found = {}
    for name in set.union(*(set(draw) for draw in draws)):
        pairs = [draw[name] for draw in draws if name in draw]
        mine, allowed = (
            math.sqrt(sum(e * e for e in column) / len(pairs))
            for column in zip(*pairs, strict=True)
        )
        found[name] = mine, allowed
    return found


def broken(found: Errors) -> Errors:
    return {n: e for n, e in found.items() if not e[0] <= LIMIT * e[1] + TINY}


def confirmed(
    errors: Callable[[int], Errors],
    suspects: Errors,
    *,
    groups: int,
    size: int,
    may_hold: int = 0,
    same_is_chance: bool = False,
) -> Errors:
    """What breaks the law in groups of further draws as well.

    Args:
        errors: of the draw with that seed.
        may_hold: how many groups but the first may hold it.
        same_is_chance: whether a tensor with one error in all draws is not judged.
    """
    held: Counter[str] = Counter()
    for group in range(groups):
        if not suspects:
            break
        first = 100 + group * size
        draws = [errors(seed) for seed in range(first, first + size)]
        again = broken(mean_squares(draws))
        if same_is_chance:
            same = [n for n in again if len({draw.get(n) for draw in draws}) == 1]
            again = {n: e for n, e in again.items() if n not in same}
        held.update(suspects.keys() - again.keys())
        most = may_hold if group else 0
        suspects = {n: again.get(n, e) for n, e in suspects.items() if held[n] <= most}
    return suspects


def ratio(pair: tuple[float, float]) -> float:
    return pair[0] / max(pair[1], TINY)


@dataclass
class Verdict:
    """What breaks the law, and how far everything is."""

    errors: Errors
    broken: Errors
    kernels: list[str]
    raised: str = ""
    refused: str = ""

    @property
    def fails(self) -> bool:
        return bool(self.broken or self.raised)

    def worst(self) -> float:
        if self.raised:
            return math.inf
        return max(map(ratio, (self.broken or self.errors).values()), default=0.0)

    def __str__(self) -> str:
        worst = sorted(self.broken.items(), key=lambda item: -ratio(item[1]))
        told = [f"{n} {a:.2g} (autocast {b:.2g})" for n, (a, b) in worst]
        return self.raised or "; ".join(told)


def judged(subject: Subject) -> Verdict:
    """The law, for one spelling on one kind of data; what breaks it is confirmed."""
    try:
        errors = mean_squares([subject.errors(seed) for seed in range(FIRST)])
        suspects = confirmed(subject.errors, broken(errors), groups=GROUPS, size=GROUP)
    except RefusedError as error:
        return Verdict({}, {}, [], refused=str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001  # what raises in ours alone is a failure
        said = (str(error).strip().splitlines() or [""])[0]
        return Verdict({}, {}, [], f"{type(error).__name__}: {said}"[:200])
    return Verdict(errors, suspects, subject.kernels())
