"""The plan in an exported program: its report, and the dtype of every node and weight.

The plan is stored inside each file that is written of the program, so that a reader of
the file can ask why an op has its precision, and can check that the file still computes
what was planned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp.errors import ExportError
from autoamp.messages import printable_line
from autoamp.passes.report_rows import SavedReport
from autoamp.passes.saved_reports import report_in
from autoamp.tools.export_program import OP, note_of, with_note

SCHEMA = "autoamp.plan"
VERSION = 1
"""Raised when a key is removed or changes its meaning, not when a key is added."""

PLAN_KEY = "autoamp"
"""The key of the plan in the metadata of a program and of each kind of file."""

_SHOWN = 3


@dataclass(frozen=True)
class Plan:
    """The plan of an exported program.

    Attributes:
        target: the name of the target that the program was made for; "" for none.
        report: the report on the rewritten graph, as plain values.
        nodes: for each node of the program that makes tensors, the dtypes of those, and
            the name in the report of the op that the node belongs to ("" for none).
        weights: for each weight of the program, the path of the model's weight that it
            was made of, and its dtype.
        classes: the classes, other than torch's and Python's, that the program takes or
            returns; a process imports their modules before it loads a file of torch's.
    """

    target: str
    report: Mapping[str, Any]
    nodes: Mapping[str, tuple[tuple[str, ...], str]]
    weights: Mapping[str, tuple[str, str]]
    classes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON; docs/out-of-process.md has the keys."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "target": self.target,
            "report": self.report,
            "nodes": {
                name: {"dtypes": [*dtypes], "op": op}
                for name, (dtypes, op) in self.nodes.items()
            },
            "weights": {
                name: {"source": source, "dtype": dtype}
                for name, (source, dtype) in self.weights.items()
            },
            "classes": [*self.classes],
        }

    def to_json(self) -> str:
        """The plan as JSON on one line."""
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))

    def check(
        self,
        where: str,
        kind: str,
        made: Mapping[str, tuple[str, ...]],
        held: Mapping[str, str],
    ) -> None:
        """Checks that what is in a file has the dtypes planned.

        Args:
            where: the file, for messages.
            kind: the word for what computes.
            made: the dtypes of what is computed, by name.
            held: the dtype of each weight.

        Raises:
            ExportError: a node or a weight is missing, is new, or has another dtype.
        """
        nodes = {name: dtypes for name, (dtypes, _) in self.nodes.items()}
        weights = {name: (dtype,) for name, (_, dtype) in self.weights.items()}
        problems = _differences(kind, nodes, made) or _differences(
            "weight", weights, {name: (dtype,) for name, dtype in held.items()}
        )
        if problems:
            more = len(problems) - _SHOWN
            shown = "; ".join(map(printable_line, problems[:_SHOWN]))
            shown += f"; and {more} more" if more > 0 else ""
            raise ExportError(
                f"{where} does not compute what its plan says: {shown}. The file was "
                "changed after autoamp.export() wrote it; export the model again"
            )


def _differences(
    kind: str,
    planned: Mapping[str, tuple[str, ...]],
    there: Mapping[str, tuple[str, ...]],
) -> list[str]:
    differences = [
        f"{kind} {name} is {', '.join(there[name])} and was planned as "
        f"{', '.join(dtypes)}"
        for name, dtypes in planned.items()
        if name in there and there[name] != dtypes
    ]
    differences += [f"{kind} {name} is gone" for name in planned if name not in there]
    differences += [
        f"{kind} {name} is in no plan" for name in there if name not in planned
    ]
    return differences


def plan_of(
    program: torch.export.ExportedProgram,
    report: str,
    sources: Mapping[str, str],
    target: str,
) -> Plan:
    """The plan of a program that was just made.

    Args:
        report: the report as JSON.
        sources: for each weight of the program, the path of the model's weight.
    """
    return Plan(
        target=target,
        report=json.loads(report),
        nodes={
            name: (_names(dtypes), note_of(node, OP) or "")
            for name, node, dtypes in made_by(program.graph)
        },
        weights={
            name: (sources.get(name, name), _names([tensor.dtype])[0])
            for name, tensor in held_by(program)
        },
        classes=_classes_of(program),
    )


def _classes_of(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The classes among a program's arguments and results that torch has to import.

    Torch's loaders find such a class once the module is imported that registers it.
    """
    specs = [program.call_spec.in_spec, program.call_spec.out_spec]
    classes: dict[str, None] = {}
    while specs:
        spec = specs.pop()
        if spec is None or spec.is_leaf():
            continue
        specs += spec.children()
        kinds = (spec.type, spec.context)  # a named tuple's class is the context
        for kind in (each for each in kinds if isinstance(each, type)):
            package = kind.__module__.partition(".")[0]
            if package not in ("builtins", "collections", "torch"):
                classes[f"{kind.__module__}.{kind.__qualname__}"] = None
    return tuple(classes)


def check_program(
    where: str, plan: Plan, program: torch.export.ExportedProgram
) -> None:
    """Checks that a program computes in the dtypes of its plan.

    Raises:
        ExportError: a node or a weight is missing, is new, or has another dtype.
    """
    made_dtypes = {name: _names(dtypes) for name, _, dtypes in made_by(program.graph)}
    held_dtypes = {name: _names([t.dtype])[0] for name, t in held_by(program)}
    plan.check(where, "node", made_dtypes, held_dtypes)


def keep_plan(program: torch.export.ExportedProgram, plan: dict[str, Any]) -> None:
    """Keeps a plan, of plain values, in a program and in the files saved of it."""
    gm = program.graph_module
    gm.meta.update(with_note(gm, {PLAN_KEY: plan}))


def noted_plan(program: torch.export.ExportedProgram) -> Any:
    """The plain values of the plan kept in a program; None if there is none."""
    return note_of(program.graph_module, PLAN_KEY)


def plan_kept_in(program: torch.export.ExportedProgram) -> Plan:
    """The plan of a program that `plan_of` was kept in."""
    return plan_from("the program", noted_plan(program))[0]


def plan_from(where: str, data: object) -> tuple[Plan, SavedReport]:
    """The plan and its report from the plain values in a file; all are checked.

    Args:
        where: the file, for messages.

    Raises:
        ExportError: the values are no plan, or of a newer version.
        OptionError: the report in the plan is none.
    """
    if data is None:
        raise ExportError(
            f"{where} holds no plan of autoamp: another tool wrote it, or another tool "
            "wrote it again and left the plan out. autoamp.export() writes files "
            "with a plan"
        )

    def fails(problem: str) -> ExportError:
        return ExportError(f"{where}: the plan in it cannot be read: {problem}")

    def checked(value: Any, name: str, kind: str) -> Any:
        if not _IS[kind](value):
            raise fails(f"{name} is no {kind}")
        return value

    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise fails(f"it is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise fails(f"its schema is not {SCHEMA!r}")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise fails("its version is no number")
    if version > VERSION:
        raise ExportError(
            f"{where}: its plan has version {version}, and this autoamp reads "
            f"{VERSION}: upgrade autoamp"
        )
    read: dict[str, Any] = data

    def rows(key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, row in checked(read.get(key), key, "object").items():
            yield name, checked(row, f"{key}.{printable_line(name, 80)}", "object")

    nodes = {
        name: (
            tuple(checked(row.get("dtypes"), "dtypes", "list of strings")),
            checked(row.get("op"), "op", "string"),
        )
        for name, row in rows("nodes")
    }
    weights = {
        name: (
            checked(row.get("source"), "source", "string"),
            checked(row.get("dtype"), "dtype", "string"),
        )
        for name, row in rows("weights")
    }
    report = data.get("report")
    # Files of earlier days have no classes.
    classes = checked(data.get("classes", []), "classes", "list of strings")
    target = checked(data.get("target"), "target", "string")
    plan = Plan(target, report or {}, nodes, weights, tuple(classes))
    return plan, report_in(where, report)


_IS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
    "list of strings": lambda value: (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    ),
}


def made_by(
    graph: fx.Graph, path: str = ""
) -> Iterator[tuple[str, fx.Node, list[torch.dtype]]]:
    """Each node that computes tensors, its name, and the dtypes of those tensors.

    The name of a node in a branch or a loop has the names of the bodies before it.
    """
    for node in graph.nodes:
        dtypes = [t.dtype for t in _tensors(node.meta.get("val"))]
        if node.op == "call_function" and dtypes:
            yield path + node.name, node, dtypes
    for name in dict.fromkeys(str(n.target) for n in graph.find_nodes(op="get_attr")):
        body = getattr(graph.owning_module, name, None)
        if isinstance(body, fx.GraphModule):
            yield from made_by(body.graph, f"{path}{name}.")


def held_by(
    program: torch.export.ExportedProgram,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights and constants of a program by their names."""
    yield from program.state_dict.items()
    for name, value in program.constants.items():
        if isinstance(value, torch.Tensor) and name not in program.state_dict:
            yield name, value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
