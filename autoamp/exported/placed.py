"""The passes on a captured graph, as they run on the graphs of a converted model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoamp.capture.engine import Engine
from autoamp.capture.record import Record
from autoamp.errors import ExportError
from autoamp.exported.captured import Captured
from autoamp.model.kept import left_as_it_is
from autoamp.options import Options
from autoamp.pipeline.prepared import Prepared
from autoamp.place.cost import PriceModel
from autoamp.place.devices import Device
from autoamp.printable import class_name
from autoamp.training.model_scaling import ModelScaling, ScaleDomain
from autoamp.training.scale import NoLossScale


def placed(
    graph: Captured,
    model: nn.Module,
    options: Options,
    low: torch.dtype,
    *,
    device: Device | None,
    price: PriceModel | None,
) -> tuple[Record, Prepared, tuple[Any, ...]]:
    """A record with the rewritten graph, the graph, and its results on the values.

    The graph is held to the lock of `options`, and its first run checks the dtype of
    each result, as that of a converted model's graph does.

    Args:
        model: the model, whose buffers and generators are left as they are.
        low: the compute dtype.
        device, price: as for `Engine`.

    Raises:
        AutoampError: a pass or a check failed, after which a converted model would run
            in fp32; under `strict`, any of them failed, or the placement is not the
            lock's.
    """
    options = options.replace(backend="eager", loss_scale="off")
    label = class_name(model)
    record = Record(label, low, ModelScaling(ScaleDomain(NoLossScale()), label))
    engine = Engine(options, record, device=device, price=price)
    with torch.no_grad():
        prepared = engine.prepared(graph.gm, graph.fakes)
        if prepared.rewritten is None:
            raise ExportError(f"the pass failed on {label}: {prepared.problem}")
        values = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, graph.values)
        with left_as_it_is(model):
            results = prepared.run(*values)
    return record, prepared, tuple(results)
