"""A model as a program: captured by `torch.export`, placed, and exported once more.

A converted model runs a graph that is handed low copies of fp32 weights, and that calls
functions of autoamp's where torch has no kernel.  A program holds the low weights
themselves, and an fp32 weight only where an op reads fp32.  `torch.export` traces
through the functions, so that nothing is in it but torch's own ops.
"""

from __future__ import annotations

import inspect
import operator
import sysconfig
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import ExportError, OptionError
from autoamp.messages import advice, class_name, printable_line
from autoamp.passes.decide.devices import Device
from autoamp.passes.functions import attention, layer_norm, op_with_its_state, rms_norm
from autoamp.passes.graph_record import Prepared
from autoamp.passes.write.copied import copied
from autoamp.passes.write.hoist_weight_casts import FOLDED
from autoamp.runtime.conversion_record import Record
from autoamp.runtime.engine import Engine
from autoamp.runtime.examine import twin_of
from autoamp.runtime.module_state import left_as_it_is
from autoamp.runtime.program import disabled
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.options import Options
from autoamp.training.scale import NoLossScale

OP = "autoamp_op"
"""The note at a node of the exported graph: the name in the report of its op."""


def with_note(node: fx.Node | fx.GraphModule, note: dict[str, Any]) -> dict[str, Any]:
    """The metadata of `node` with a note, which `torch.export` keeps in files."""
    return {**node.meta, "custom": {**node.meta.get("custom", {}), **note}}


def note_of(node: fx.Node | fx.GraphModule, key: str) -> Any:
    """What `with_note` has noted of a node under `key`; None if nothing."""
    return (node.meta.get("custom") or {}).get(key)


# -- the model's own code as one graph -------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a model, for which the model is exported.

    Attributes:
        args, kwargs: the arguments.
        dynamic_shapes: the sizes that may change, as for `torch.export.export`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None

    def export(self, model: nn.Module) -> torch.export.ExportedProgram:
        """The program of `model` in fp32 or as written, without gradients."""
        with torch.no_grad(), compat.autocast_off(), warnings.catch_warnings():
            # Recurrent layers of torch's own set a list of their weights anew.
            warnings.filterwarnings("ignore", r"The tensor attributes .*_flat_weights")
            return torch.export.export(
                model,
                self.args,
                dict(self.kwargs),
                dynamic_shapes=self.dynamic_shapes,
            )

    def results(self, model: nn.Module) -> list[Any]:
        """The flat results of the call, which changes neither model nor arguments."""
        args, kwargs = pytree.tree_map_only(
            Tensor, Tensor.clone, (self.args, dict(self.kwargs))
        )
        with left_as_it_is(model), torch.no_grad(), compat.autocast_off():
            return list(pytree.tree_leaves(model(*args, **kwargs)))

    def results_of(self, program: torch.export.ExportedProgram) -> list[Any]:
        """The flat results of the call of a program."""
        with disabled():  # the automatic mode would meet the program's module
            return self.results(program.module())


@dataclass(frozen=True)
class Captured:
    """A graph with one input for each value in the arguments of a call.

    Attributes:
        model: the model.
        gm: takes the values in the order in which torch flattens the arguments, and
            returns a tuple of values; parameters and buffers are its attributes.
        values: the values of the call given.
        fakes: for each value its fake tensor, whose sizes are symbols where any size
            is meant.
        program: what `torch.export` made of the model.
        signature: the signature of the model's `forward`.
    """

    model: nn.Module
    gm: fx.GraphModule
    values: tuple[Any, ...]
    fakes: tuple[Any, ...]
    program: torch.export.ExportedProgram
    signature: inspect.Signature


def captured(model: nn.Module, call: Call) -> Captured:
    """The graph of a call of `model` in fp32, without gradients.

    Raises:
        ExportError: `torch.export` cannot make one graph of the model.
        OptionError: the model's `forward` does not take these arguments.
    """
    twin = twin_of(model)
    try:
        inspect.signature(twin.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise OptionError(
            f"{class_name(model)}.forward() cannot be called with these args and "
            f"kwargs: {error}; give all arguments of one call"
        ) from error
    try:
        with disabled():
            program = call.export(twin)
    except Exception as error:
        reason = str(error).strip().partition("\n\n")[0].partition("\nCaused by")[0]
        text = printable_line(f"{type(error).__name__}: {reason}", 800).rstrip(".")
        line = _users_line(error)
        raise ExportError(
            f"{class_name(model)} cannot be exported, because torch.export cannot make "
            f"one graph of it: {text}{f' (at {line})' if line else ''}. "
            "autoamp.convert() takes models in parts and has no such limit; to export, "
            "change that line, or export the part of the model that torch.export takes "
            "(torch.export.draft_export lists all that is in the way)"
        ) from error
    gm = compat.flat_graph(program)
    _, by_name = program.example_inputs or ((), {})
    kwargs = {name: call.kwargs[name] for name in by_name}  # in the program's order
    values = tuple(pytree.tree_leaves((call.args, kwargs)))
    inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    fakes = tuple(
        fake if isinstance(value, Tensor) else value
        for fake, value in zip(inputs, values, strict=True)
    )
    signature = inspect.signature(twin.forward)
    return Captured(model, gm, values, fakes, program, signature)


def _users_line(error: Exception) -> str:
    """The innermost line on the way to an error that is neither torch's nor ours."""
    apart = (
        *(str(Path(torch.__file__).parent), str(Path(__file__).parents[1])),
        sysconfig.get_path("stdlib") + "/",
    )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*apart, "<")):
            where = f"{frame.filename}:{frame.lineno}: {frame.line}"
            return printable_line(where, 300)
    return ""


# -- the passes on that graph ----------------------------------------------------------


class Placed(NamedTuple):
    """A rewritten graph.

    Attributes:
        record: the record for its report.
        prepared: the graph.
        results: its results on the values of the call.
    """

    record: Record
    prepared: Prepared
    results: list[Any]


def placed(
    graph: Captured,
    options: Options,
    low: torch.dtype,
    *,
    device: Device | None,
) -> Placed:
    """The graph, rewritten and checked as a converted model's graphs are.

    The first run of the graph checks the dtype of each result.  Buffers and
    generators are left as they are.

    Args:
        low: the compute dtype.
        device: as for `Engine`.

    Raises:
        AutoampError: a pass or a check failed, after which a converted model would run
            in fp32; under `strict`, any of them failed.
    """
    options = options.replace(backend="eager", loss_scale="off")
    label = class_name(graph.model)
    record = Record(label, low, ModelScaling(NoLossScale(), label))
    engine = Engine(options, record, device=device)
    with torch.no_grad():
        prepared = engine.prepared(graph.gm, graph.fakes)
        if prepared.rewritten is None:
            raise ExportError(f"the pass failed on {label}: {prepared.problem}")
        with left_as_it_is(graph.model):
            # The graph may write to its tensors.
            values = pytree.tree_map_only(Tensor, Tensor.clone, graph.values)
            results = prepared.run(*values)
    return Placed(record, prepared, [*results])


# -- the rewritten graph as a module ---------------------------------------------------


class MixedModel:
    """A rewritten graph with weights of its own, called as the model is called.

    A weight that is read in one precision has the path that it has in the model.  Of a
    weight that is read in two, the low one has the name of its dtype behind the path.

    Attributes:
        module: the module to export.
        sources: for each weight of the module, the path of the model's weight that it
            is, or that it is a cast of.
    """

    def __init__(self, graph: Captured, gm: fx.GraphModule) -> None:
        """Makes the module.

        Args:
            graph: the graph that was captured.
            gm: what the passes made of it; casts of weights are constants in it.
        """
        new, _ = copied(gm)
        self.module, self._graph = nn.Module(), new.graph
        self._one_dtype = False
        self.sources = _take_weights(self.module, gm, new, graph.model)
        output = graph.program.call_spec.out_spec

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = _Noting(self.module, graph=self._graph, garbage_collect_values=False)
            run.one_dtype = self._one_dtype
            with fx.traceback.preserve_node_meta():
                results = run.run(*pytree.tree_leaves((args, kwargs)))
            return pytree.tree_unflatten([*results], output)

        # Torch names the inputs by the signature.
        forward.__signature__ = graph.signature  # type: ignore[attr-defined]
        self.module.forward = forward
        self.module.eval()

    def export(
        self, call: Call, *, one_dtype: bool = False
    ) -> torch.export.ExportedProgram:
        """The exported program, with the signature of the model.

        Args:
            one_dtype: whether norms whose data are low and whose weights are fp32 are
                written as an fp32 norm between casts.

        Raises:
            ExportError: `torch.export` refuses the rewritten graph.
        """
        self._one_dtype = one_dtype
        try:
            return call.export(self.module)
        except Exception as error:
            raise ExportError(
                "torch.export takes the model, and refuses the rewritten graph: "
                f"{type(error).__name__}: {printable_line(str(error), 1500)}. Please "
                f"report this; {advice('keep', ['PATH'], by_variables=False)} for "
                f"parts of the model, or {advice('fuse', False, by_variables=False)}, "
                "may help meanwhile"
            ) from error


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by all of their paths."""
    return {
        **dict(nn.Module.named_parameters(model, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(model, remove_duplicate=False)),
    }


def _take_weights(
    root: nn.Module, gm: fx.GraphModule, new: fx.GraphModule, model: nn.Module
) -> dict[str, str]:
    """Gives `root` the weights and bodies that the graph of `new` reads.

    Args:
        gm: the graph that `new` is a copy of.

    Returns:
        For each weight of `root`, the path of the model's weight.
    """
    folded = gm.meta.get(FOLDED, {})  # casts of weights, each to the weight
    values: dict[fx.Node, Tensor] = {}
    for node in new.graph.find_nodes(op="get_attr"):
        if not node.users:
            new.graph.erase_node(node)
            continue
        value = operator.attrgetter(str(node.target))(new)
        if isinstance(value, Tensor):
            values[node] = value
        else:  # the body of a branch or of a loop
            setattr(root, str(node.target), value)
    casts = {
        node: operator.attrgetter(folded[str(node.target)])(gm)
        for node in values
        if str(node.target) in folded
    }
    paths: dict[object, str] = {}
    for path, weight in weights_of(model).items():
        paths.setdefault(_identity(weight), path)
    wide = {_identity(value) for node, value in values.items() if node not in casts}
    named: dict[object, str] = {}
    sources: dict[str, str] = {}
    for node, value in values.items():
        source = casts.get(node, value)
        strides = value.stride() if value.layout is torch.strided else None
        key = (_identity(source), value.dtype, strides)
        if key not in named:
            path = paths.get(_identity(source), str(node.target).replace(".", "_"))
            in_both = node in casts and _identity(source) in wide
            wanted = f"{path}_{short_name(value.dtype)}" if in_both else path
            name, number = wanted, 1
            while name in sources:
                number, name = number + 1, f"{wanted}_{number}"
            named[key], sources[name] = name, path
            copy = value.detach().clone() if source is value else value
            if isinstance(source, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=False)
            _put(root, name, copy)
        node.target = named[key]
    return sources


def _identity(tensor: Tensor) -> object:
    """Equal for two tensors that are the same elements in the same order."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)
    storage = tensor.untyped_storage().data_ptr()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return storage, tensor.dtype, *place


def _put(root: nn.Module, path: str, value: Tensor) -> None:
    """Makes `value` the parameter or the buffer `path` of `root`."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    else:
        root.register_buffer(name, value)


# -- torch's own ops alone -------------------------------------------------------------

_ATEN = torch.ops.aten

_WITHOUT_GRADIENTS: dict[Any, Any] = {
    attention: _ATEN.scaled_dot_product_attention.default,
}
"""Functions of autoamp's, each to the op that it calls where no gradient is recorded.

What such a function asks about sizes would bound the sizes that a program takes."""

_NORMS = frozenset(
    {
        _ATEN.batch_norm.default,
        _ATEN.group_norm.default,
        _ATEN.instance_norm.default,
        _ATEN.layer_norm.default,
        _ATEN.native_layer_norm.default,
        _ATEN.rms_norm.default,
        layer_norm,
        rms_norm,
    }
)
"""Calls whose data may be low while their weights are fp32."""


class _Noting(fx.Interpreter):
    """Runs a graph; what is traced meanwhile keeps the metadata of the graph's nodes.

    Attributes:
        one_dtype: whether calls that read floats of several dtypes, as norms and
            recurrent ops do in torch alone, are made in fp32, between casts.
    """

    one_dtype = False

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        meta, n.meta = n.meta, with_note(n, {OP: n.name})
        if "stack_trace" not in meta:  # a cast has no line of its own, its reader has
            lines = [user.meta.get("stack_trace") for user in n.users]
            n.meta["stack_trace"] = next(filter(None, lines), "")
        try:
            return super().run_node(n)
        finally:
            n.meta = meta

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = _WITHOUT_GRADIENTS.get(target, target)
        if not self.one_dtype:
            return super().call_function(target, args, kwargs)
        floats = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if _is_float(x)]
        op = op_with_its_state(target)
        if op is target and (target not in _NORMS or len(set(floats)) < 2):
            return super().call_function(target, args, kwargs)
        up = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        result = super().call_function(op, *up)
        if op is not target:  # a state that is fp32, with results that are
            return result
        low = floats[0]  # the data come first
        # Only the first result of a native norm is data; statistics stay fp32.
        if isinstance(result, tuple):
            return (result[0].to(low), *result[1:])
        return result.to(low)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _widened(value: Tensor) -> Tensor:
    return value.float() if _is_float(value) else value
