"""The memory of a training step, counted on tensors without data."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.check.saved_bytes import bytes_held, storage_key, tensors_saved
from autoamp.passes.write.emitted import CAST_KIND, WEIGHT_PATH
from autoamp.reports.figures import Document, StepMemory
from autoamp_said import logger_of

logger = logger_of(__name__)


def memory_of_step(model: nn.Module, report: Document) -> StepMemory | None:
    """What a training step of `model` holds.

    The result is None where no graph was rewritten, or where nothing is trained.

    Args:
        report: the report on the captured graphs, for a call of the model.
    """
    weights = _parts(model.parameters())
    trained = [each for each in weights if each.requires_grad]
    # `capture_now` captures a model in eval mode without gradients.
    if not (report.rewritten and trained and model.training):
        return None
    named = model.named_parameters(remove_duplicate=False)
    frozen = {path for path, weight in named if not weight.requires_grad}
    counted = True
    try:
        graphs = zip(report.rewritten, report.graphs, strict=True)
        kept = sum(
            _kept_for_backward(gm, found.facts.parameters, frozen)
            for found, gm in graphs
        )
    except Exception:  # an op of the user's own may have no rule for fake tensors
        logger.debug("autoamp: the values kept are not counted", exc_info=True)
        kept, counted = report.headline.kept, False
    sizes = {
        storage_key(t): bytes_held(t) for t in (*weights, *_parts(model.buffers()))
    }
    return StepMemory(
        weights=sum(sizes.values()),
        copies=report.cast_counts.kept_bytes,
        gradients=sum(each.nbytes for each in trained),
        kept=kept,
        is_counted=counted,
    )


def _parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of tensors, some of which may be DTensors."""
    # The local part of a DTensor does not say whether the DTensor is trained.
    return [
        compat.local_part(each).detach().requires_grad_(each.requires_grad)
        for each in tensors
    ]


class _WithoutMeta(fx.Interpreter):
    """Runs a graph of the meta device on the CPU.

    On the meta device attention keeps its scores, which the kernels of no other do.
    """

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return pytree.tree_map_only(
            torch.device, _not_meta, super().fetch_args_kwargs_from_env(n)
        )


def _not_meta(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _kept_for_backward(
    gm: fx.GraphModule, parameters: Collection[str], frozen: Collection[str]
) -> int:
    """The bytes that autograd keeps when a graph runs, without weights and copies.

    The graph runs on fake tensors, which have shapes and no data.

    Args:
        parameters: the names of the inputs that are parameters of the model.
        frozen: the paths of the parameters that are not trained.
    """
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    inputs: list[Any] = []
    weights = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            inputs.append(compat.hint(value))
            continue
        is_copy = node.meta.get(CAST_KIND) == "weight"
        trains = bool(node.meta.get("autoamp_requires_grad"))
        if is_copy:  # its gradient goes on to its weight
            trains = node.meta[WEIGHT_PATH] not in frozen
        with mode:
            fake = torch.empty_strided(
                [compat.hint(size) for size in value.shape],
                [compat.hint(step) for step in value.stride()],
                dtype=value.dtype,
                device=_not_meta(value.device),
                requires_grad=trains,
            )
        inputs.append(fake)
        if is_copy or node.name in parameters:
            weights.append(fake)
    # A graph enters regions by calls: one that raises half-way would leave them on.
    modes, drawn = compat.Modes(), compat.Generators()
    try:
        with compat.autocast_off(), mode, torch.enable_grad():
            kept = tensors_saved(lambda: _WithoutMeta(gm).run(*inputs), weights)
    finally:
        modes.restore()
        drawn.restore()
    return sum(map(bytes_held, kept))
