"""One rank of a model that several devices share, without the other ranks.

The process group is torch's fake one: its collectives do nothing.  A model of
transformers is parallelized by the plan of its own class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed, nn

from autoamp import compat
from autoamp.ask.stand_in import Call
from autoamp.errors import OptionError
from autoamp.printable import class_name

Maker = Callable[[], tuple[nn.Module, Call]]
"""Makes a model and a call of it, on the process group that is up."""

_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
)
"""Numbers of a configuration that the devices of a layer must share evenly."""

_WHOLE = "replicated_with_grad_allreduce"
"""The style of a module that each device has whole, such as a norm of heads."""


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """A region in which this process is rank `rank` of `size` that do not exist.

    Raises:
        OptionError: a process group is up, or this torch has no fake one.
    """
    if size == 1:
        yield
        return
    if distributed.is_available() and distributed.is_initialized():
        raise OptionError(
            "a process group is up, and a mesh needs a pretended one: plan in a "
            "process of its own, before init_process_group"
        )
    if not (distributed.is_available() and compat.begin_fake_group(rank, size)):
        raise OptionError(
            f"this torch ({torch.__version__}) cannot pretend ranks; give a mesh "
            "with tp=1"
        )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def parallelized(model: nn.Module, size: int) -> None:
    """Splits a model over `size` devices, as the plan of its class says.

    A model that holds DTensors has been split by its maker and stays as it is.

    Raises:
        OptionError: the model has no plan, the plan has an unknown style, or `size`
            does not divide what it must.
    """
    if size == 1 or any(map(compat.is_distributed, model.parameters())):
        return
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise OptionError(
            f"{class_name(model)} has no plan of tensor parallelism: give tp=1, or a "
            "MODULE:FACTORY that calls parallelize_module itself"
        )
    check_sizes(model, size)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    styles = {
        name: _style(name, style, model)
        for name, style in plan.items()
        if style != _WHOLE
    }
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, styles, src_data_rank=None)


def check_sizes(model: nn.Module, size: int) -> None:
    """Refuses a number of devices that does not divide heads or widths."""
    config: Any = getattr(model, "config", None)
    for name in _SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value % size:
            raise OptionError(
                f"tp={size} does not divide {name}={value} of {class_name(model)}; "
                "give a tp that does"
            )


def _style(name: str, style: str, model: nn.Module) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    whole = Replicate()
    known: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=whole),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=whole),
        "rowwise": RowwiseParallel,
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=whole),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=whole),
        "sequence_parallel": SequenceParallel,
    }
    if style not in known:
        raise OptionError(
            f"{class_name(model)} splits {name} in the style {style!r}, which is not "
            f"planned (planned are {', '.join([*known, _WHOLE])}): give tp=1, or a "
            "MODULE:FACTORY that calls parallelize_module itself"
        )
    return known[style]()
