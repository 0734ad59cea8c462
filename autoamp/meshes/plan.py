"""`plan`: one device, or a mesh of many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import nn

from autoamp.ask.examine import checked_model, refuse_options
from autoamp.errors import OptionError
from autoamp.meshes.result import MeshPlan
from autoamp.planning.ask import plan as plan_of_one
from autoamp.planning.optimizer import Make
from autoamp.planning.result import Plan


@overload
def plan(
    model: nn.Module | str,
    *args: Any,
    device: str | None = None,
    batch: int = 1,
    sequence: int | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    mesh: None = None,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
    **kwargs: Any,
) -> Plan: ...


@overload
def plan(
    model: nn.Module | str,
    *args: Any,
    device: str | None = None,
    batch: int = 1,
    sequence: int | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    mesh: str,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
    **kwargs: Any,
) -> MeshPlan: ...


def plan(
    model: nn.Module | str,
    *args: Any,
    device: str | None = None,
    batch: int = 1,
    sequence: int | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    mesh: str | None = None,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
    **kwargs: Any,
) -> Plan | MeshPlan:
    """Predicts time and peak memory of a step in fp32, autocast and autoamp.

    No weights are needed and nothing is downloaded: a model may be named, or stand on
    the meta device.  Memory is counted by running the step on tensors that hold no
    data; times are the predictions of `autoamp.explain`.

    Args:
        model: a `torch.nn.Module`, which is not changed, or the name of one: a
            configuration of transformers with literal arguments, such as
            "transformers:LlamaConfig(num_hidden_layers=8)"; a type of model, such as
            "transformers:gpt2"; or the path of a config.json of Hugging Face.
        *args: the arguments of a call, where the model is a module.
        device: the device to plan for, as for `autoamp.explain`; by default the GPU of
            this machine, and "cuda:sm_80" where there is none.
        batch: samples of a step of a named model.
        sequence: tokens of a sample of a named model; by default as many as the model
            takes, at most 1,024.
        infer: whether a step is a call in eval mode without gradients.
        optimizer: "adamw", "sgd" (with momentum), "none", or a function that makes an
            optimizer of a list of parameters.
        options: keyword arguments of `convert`, such as `{"precision": "bf16"}`.
        mesh: many devices, such as "dp=512,tp=8,pp=4": replicas, devices that share
            each layer, and stages; `batch` is then a micro-batch of one replica.  The
            layers of a model of transformers are split by the plan of its class.
        node: devices of a node of a mesh.
        network: gigabits a second of the network of each device of a mesh.
        microbatches: micro-batches of a step on a mesh; by default four for each stage.
        **kwargs: keyword arguments of the call.

    Returns:
        The figures in bytes and seconds, on a mesh those of one device; `print(plan)`
        shows them as a table, and `plan.to_json()` writes them.

    Raises:
        AutoampError: the model, the device or an option cannot be used; a model that
            reads a value of a tensor cannot be planned.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4096, 4096)
        >>> found = autoamp.plan(model, torch.empty(512, 4096), device="cuda:sm_80")
        >>> found.way("fp32").weights, found.way("fp32").optimizer
        (67125248, 134250504)
    """
    if mesh is None:
        return plan_of_one(
            model,
            *args,
            device=device,
            batch=batch,
            sequence=sequence,
            infer=infer,
            optimizer=optimizer,
            options=options,
            **kwargs,
        )
    from autoamp.meshes.ask import maker_of_module, maker_of_name, planned

    if infer:
        raise OptionError("a mesh is planned for training steps; leave out infer")
    if batch < 1 or (sequence is not None and sequence < 1):
        raise OptionError("batch and sequence must be numbers above 0")
    if isinstance(model, str) and (args or kwargs):
        raise OptionError(
            "plan() makes the arguments of a named model itself; give none"
        )
    if isinstance(model, str):
        make = maker_of_name(model, batch, sequence)
    else:
        refuse_options("plan", model, kwargs)
        make = maker_of_module(checked_model(model), (args, kwargs))
    return planned(
        make,
        mesh,
        device=device,
        node=node,
        network=network,
        microbatches=microbatches,
        optimizer=optimizer,
        options=options,
    )
