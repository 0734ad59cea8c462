"""CUDA without a GPU: models and batches as fake tensors of a CUDA device.

A CUDA build of torch runs every operator on them as far as shapes, dtypes and devices
go; a build for CPUs alone does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from autoamp import compat
from tests.models import Case

SKIPPED = pytest.mark.skipif(
    torch.version.cuda is None,
    reason=f"torch {torch.__version__} is a CPU build, which has no fake CUDA",
)


def graphs_of(case: Case) -> list[tuple[fx.GraphModule, list[Any]]]:
    """The graphs that Dynamo captures of a case on a GPU, and what each is given.

    After a branch on a value there are no more: nothing has one.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = moved(case.model(), mode)
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: on_cuda(t, mode), case.inputs(0)
    )
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        # As Dynamo's own fake tensors, since those are on the other nodes.
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        found.append((gm, [n.meta["example_value"] for n in inputs]))

        def run(*values: Any) -> Any:
            with compat.as_traced():
                return gm(*values)

        return run

    with mode, nothing_to_flatten(), torch._dynamo.config.patch(allow_rnn=True):
        compiled: Any = torch._dynamo.optimize(backend)(model)
        with contextlib.suppress(DataDependentOutputException):
            compiled(*args, **kwargs)
    return found


@contextlib.contextmanager
def nothing_to_flatten() -> Iterator[None]:
    """Recurrent layers leave their weights where they are: fake ones are nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.RNNBase, "flatten_parameters", lambda self: None)
        yield


def on_cuda(tensor: Tensor, mode: FakeTensorMode, device: str = "cuda") -> Tensor:
    """A fake tensor on a GPU, or another device, that looks like `tensor`."""
    with mode:
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
    return fake.requires_grad_(tensor.requires_grad)


def moved(model: nn.Module, mode: FakeTensorMode, device: str = "cuda") -> nn.Module:
    """`model` itself, its parameters and buffers fake tensors on a GPU.

    Those that share one tensor go on doing so.
    """
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    fake = on_cuda(parameter, mode, device)
                    made[parameter] = nn.Parameter(fake, parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                made.setdefault(buffer, on_cuda(buffer, mode, device))
                module._buffers[name] = made[buffer]
    return model


@contextlib.contextmanager
def as_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Torch says that there is a GPU, of this compute capability."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        yield


@contextlib.contextmanager
def autocast(device: str, low: torch.dtype, enabled: bool = True) -> Iterator[None]:
    """`torch.autocast`, which switches itself off where there is no CUDA device."""
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_dtype(device, low)
    torch.set_autocast_enabled(device, enabled)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before)
