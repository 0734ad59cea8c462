"""Imports go down the layers, and private torch names stay in one module.

Files are read and not imported.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "autoamp"
BESIDE = (
    REPO / "autoamp_autoload.py",
    REPO / "autoamp_cli",
    REPO / "autoamp_said.py",
)
"""Modules and packages of the project that are not in the package `autoamp`."""

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"autoamp_said"}),
    frozenset({"runtime.no_model"}),
    frozenset({"messages"}),
    frozenset({"printed"}),
    frozenset({"errors", "dtypes", "removed"}),
    frozenset({"files"}),
    frozenset({"compat"}),
    frozenset({"passes.ops"}),
    frozenset({"passes.functions", "passes.rules"}),
    frozenset({"passes.kernels.normal_forms"}),
    frozenset({"passes.kernels.table"}),
    frozenset({"passes.options"}),
    frozenset({"passes.see"}),
    frozenset({"passes.decide"}),
    frozenset({"passes.write.emitted"}),
    frozenset({"passes.graph_record"}),
    frozenset({"passes.write"}),
    frozenset({"passes.kernels", "passes.node_by_node"}),
    frozenset({"passes.check", "passes.speeds"}),
    frozenset({"passes"}),
    frozenset({"training"}),
    frozenset({"runtime"}),
    frozenset({"reports"}),
    frozenset({"tools"}),
    frozenset({"api"}),
    frozenset({"auto"}),
    frozenset({"trainers"}),
    frozenset({"__init__", "autoamp_cli"}),
    frozenset({"__main__"}),
    frozenset({"autoamp_autoload"}),
)
"""From the bottom up: a module imports only from rows below its own.

A name is a module or a sub-package of `autoamp`, or a module that stands beside it; a
part that lies lower than the rest of its sub-package has a name with dots, in which a
star stands for any folder.
Inside a sub-package modules may import each other as long as they make no loop.
"""

_PARTS = {unit for units in LAYERS for unit in units if "." in unit}

APART = (
    ("passes.write.casts", "passes.write.emitted"),
    ("passes.write.copied",),
    ("passes.kernels.fuse",),
    (
        "passes.check.invariants",
        "passes.check.allowed_changes",
        "passes.check.compare",
        "passes.check.operands",
        "passes.check.standin",
        "passes.check.verify",
    ),
)
"""No group reaches another, even through a third: the check of a graph must not learn
what is legal from the code that made the graph."""

ANYWHERE = "*"

PRIVATE_ALLOWED: dict[tuple[str, str], str] = {
    (ANYWHERE, "torch._ops.OpOverload"): (
        "the type of every ATen node's target; torch has no public name for it"
    ),
    (ANYWHERE, "torch.utils._pytree"): (
        "how FX flattens arguments; torch has no public name for it"
    ),
    ("autoamp.runtime.conversion", "_replicate_for_data_parallel"): (
        "what nn.DataParallel calls; a method of that name is how it is met"
    ),
}
"""(module, name or attribute) to the reason why it is not in `compat`.

A name covers everything below it; an entry that no line uses any more fails too.
"""


class Import(NamedTuple):
    """One import of the project's own module `target` by its module `source`."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules_of(root: Path, beside: Collection[Path] = ()) -> dict[str, Path]:
    """Module name to file; a package's `__init__.py` goes by the package's name."""
    found = {path.stem: path for path in beside if not path.is_dir()}
    for folder in (root, *(path for path in beside if path.is_dir())):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(modules: dict[str, Path]) -> list[Import]:
    """Every import of the project's own modules, late and type-only ones too."""
    found = []
    for source, path in modules.items():
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            for name in imported_names(node, package):
                parts = name.split(".")
                inside = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
                target = next((each for each in inside if each in modules), None)
                if target is not None:
                    found.append(Import(source, target, node.lineno))
    return found


def imported_names(node: ast.AST, package: str) -> list[str]:
    """Absolute dotted names that one node imports, each as deep as it could mean."""
    if isinstance(node, ast.Import):
        return [item.name for item in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[: 1 - node.level or None] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{base}.{item.name}" for item in node.names]
    if isinstance(node, ast.Call) and node.args:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in {"import_module", "__import__"}:
            return [str(getattr(node.args[0], "value", ""))]
    return []


def is_private(name: str) -> bool:
    """Whether a part of a dotted name is; `torch.ops._x` is an operator of ATen's."""
    parts = name.split(".")
    return parts[:2] != ["torch", "ops"] and any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names of torch's modules that a file imports or reads, with lines."""
    stands_for: dict[str, str] = {}
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = getattr(node, "module", None)
            for item in node.names:
                name = f"{base}.{item.name}" if base else item.name
                names.append((node.lineno, name))
                top = name if item.asname or base else name.partition(".")[0]
                stands_for[item.asname or (item.name if base else top)] = top
    inner: set[int] = set()
    for node in ast.walk(tree):  # an attribute comes before those inside of it
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        at, parts = node, [node.attr]
        while isinstance(at.value, ast.Attribute):
            at = at.value
            inner.add(id(at))
            parts.append(at.attr)
        base = stands_for.get(getattr(at.value, "id", ""), "")
        if base and not is_private(base):  # the import of a private one is in already
            names.append((node.lineno, ".".join([base, *reversed(parts)])))
    for line, name in names:
        if name.startswith("torch.") and is_private(name):
            yield line, name


def attributes_of_objects(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private attributes of torch's objects that a file reads or sets."""
    private = private_attributes()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            owner = getattr(node.value, "id", "")
            if owner not in ("self", "cls"):
                yield node.lineno, node.attr


@functools.cache
def private_attributes() -> frozenset[str]:
    """Names of private attributes of the objects of torch's that we handle."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    graph = torch.fx.symbolic_trace(layer)
    handled: list[object] = [
        layer,
        layer.weight,
        layer.weight.untyped_storage(),
        layer(torch.ones(1)).grad_fn,
        torch.compile(layer),
        optimizer,
        torch.optim.LBFGS(layer.parameters()),
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.amp.GradScaler("cpu"),
        torch.autocast("cpu"),
        graph,
        graph.graph,
        next(iter(graph.graph.nodes)),
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add.Tensor._schema,
        torch.ops.aten.add.Tensor._schema.arguments[0],
        torch.ops.higher_order.cond,
    ]
    names = {name for each in handled for name in dir(each)}
    marks = {"_opt_called"}  # set by schedulers, on optimizers
    return frozenset(n for n in names | marks if is_private(n))


def layer_of(module: str) -> int | None:
    """The row of `autoamp.a.b`, or None where `a` is in no row."""
    unit = unit_of(module)
    rows = [row for row, units in enumerate(LAYERS) if unit in units]
    return rows[0] if rows else None


def unit_of(module: str) -> str:
    """`autoamp.passes.see.facts` belongs to `passes.see`; the root to `__init__`."""
    top, *parts = module.split(".")
    if top != PACKAGE.name:
        return top
    inside = (".".join(parts[:n]) for n in range(len(parts), 1, -1))
    lower = (p for part in inside for p in _PARTS if fnmatch.fnmatch(part, p))
    return next(lower, [*parts, "__init__"][0])


def layering_faults(root: Path, beside: Collection[Path] = ()) -> list[str]:
    """What is wrong with the imports of the package whose folder is `root`.

    Args:
        beside: the project's modules that are not in the package.
    """
    modules = modules_of(root, beside)
    edges = imports_of(modules)
    faults = [
        f"{module} is in no layer: add `{unit_of(module)}` to LAYERS"
        for module in modules
        if layer_of(module) is None
    ]
    for edge in edges:
        source, target = layer_of(edge.source), layer_of(edge.target)
        if edge.target == root.name:
            faults.append(f"{edge}: nothing imports the package root")
        elif source is None or target is None:
            continue  # already said above
        elif unit_of(edge.source) == unit_of(edge.target):
            if edge.source == edge.target:
                faults.append(f"{edge}: a module imports itself")
        elif target == source:
            faults.append(f"{edge}: both are in the same layer")
        elif target > source:
            faults.append(f"{edge}: that is a higher layer")
    return faults + cycle_faults(edges) + apart_faults(root.name, edges)


def cycle_faults(edges: Iterable[Import]) -> list[str]:
    """Loops of modules that import each other, late imports included."""
    graph = nx.DiGraph((edge.source, edge.target) for edge in edges)
    loops = (sorted(part) for part in nx.strongly_connected_components(graph))
    return [f"import loop: {' <-> '.join(loop)}" for loop in loops if len(loop) > 1]


def apart_faults(root: str, edges: Iterable[Import]) -> list[str]:
    """Pairs in APART of which one reaches the other."""
    graph = nx.DiGraph((edge.source, edge.target) for edge in edges)
    apart = [[f"{root}.{name}" for name in group] for group in APART]
    graph.add_nodes_from(name for group in apart for name in group)
    return [
        f"{one} reaches {other}: " + " -> ".join(nx.shortest_path(graph, one, other))
        for ours, theirs in itertools.permutations(apart, 2)
        for one, other in itertools.product(ours, theirs)
        if nx.has_path(graph, one, other)
    ]


def private_faults(
    root: Path, allowed: Iterable[tuple[str, str]], beside: Collection[Path] = ()
) -> list[str]:
    """Private torch names outside `compat`, and allowances that nothing needs."""
    faults, unused = [], set(allowed)
    for module, path in modules_of(root, beside).items():
        if unit_of(module) == "compat":
            continue
        tree = ast.parse(path.read_text(), str(path))
        for line, name in {*torch_names(tree), *attributes_of_objects(tree)}:
            covering = {
                entry
                for entry in allowed
                if entry[0] in (module, ANYWHERE)
                and f"{name}.".startswith(f"{entry[1]}.")
            }
            unused -= covering
            if not covering:
                faults.append(f"{module}:{line} uses {name}, which belongs in `compat`")
    return faults + [f"allowance {entry} is no longer needed" for entry in unused]


def test_imports_go_down_the_layers() -> None:
    assert layering_faults(PACKAGE, BESIDE) == []


def test_private_torch_names_stay_in_compat() -> None:
    assert private_faults(PACKAGE, PRIVATE_ALLOWED, beside=BESIDE) == []


# -- the checks can fail -------------------------------------------------------------


def plant(tmp_path, files: dict[str, str]) -> Path:
    """A package `autoamp` with these files, and an empty `__init__.py` per folder."""
    root = tmp_path / "autoamp"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in {root, *(path.parent for path in root.rglob("*.py"))}:
        (folder / "__init__.py").touch()
    return root


LEGAL = {
    "errors.py": "",
    "passes/ops.py": "import torch\nfrom autoamp.errors import X",
    "passes/see/facts.py": "from autoamp.passes.ops import Y",
    "passes/decide/classify.py": "from autoamp.passes.see.facts import Z",
    "passes/write/casts.py": "from autoamp.passes.see import facts",
    "passes/check/verify.py": "from autoamp.passes.ops import Y",
    "passes/run.py": "from autoamp.passes.write.casts import c, verify",
    "api.py": "import autoamp.passes.run",
    "__init__.py": "from autoamp.passes.run import run",
}


def test_a_legal_tree_has_no_faults(tmp_path) -> None:
    assert layering_faults(plant(tmp_path, LEGAL)) == []


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"errors.py": "def f():\n    import autoamp.api"}, "higher layer"),
        ({"errors.py": "from .passes import ops"}, "higher layer"),
        (
            {"passes/see/facts.py": "from ..run import x"},
            "see.facts:1 imports",
        ),
        (
            {"passes/ops.py": "import_module('autoamp.api')"},
            "autoamp.passes.ops:1 imports",
        ),
        ({"api.py": "from . import convert"}, "package root"),
        ({"dtypes.py": "from autoamp.errors import X"}, "same layer"),
        (
            {"passes/see/facts.py": "from autoamp.passes.decide.classify import x"},
            "import loop: autoamp.passes.decide.classify <-> autoamp.passes.see.facts",
        ),
        (
            {
                "passes/check/verify.py": "from autoamp.passes.helper import x",
                "passes/helper.py": "from autoamp.passes.write.casts import x",
            },
            "check.verify -> autoamp.passes.helper -> autoamp.passes.write.casts",
        ),
        ({"newcomer.py": ""}, "add `newcomer` to LAYERS"),
    ],
)
def test_a_fault_is_found(tmp_path, files: dict[str, str], fault: str) -> None:
    faults = layering_faults(plant(tmp_path, LEGAL | files))
    assert any(fault in found for found in faults), faults


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch\ntorch._dynamo.reset()", ["torch._dynamo.reset"]),
        ("import torch._guards as g\ng.x", ["torch._guards"]),
        ("from torch._ops import OpOverload as O\nO.x", ["torch._ops.OpOverload"]),
        ("import torch.fx as fx\nfx._pytree.y", ["torch.fx._pytree.y"]),
        ("import torch\nx = torch.__version__\ntorch.ops.aten._to_copy.default", []),
        ("import os\nos._exit\nself._torch = 1\nself._version = 2", []),
        ("node.target._schema.name", ["_schema"]),
        ("optimizer._opt_called = True", ["_opt_called"]),
    ],
)
def test_a_private_name_is_found(tmp_path, code: str, names: list[str]) -> None:
    root = plant(tmp_path, {"passes/ops.py": code, "compat.py": code})
    faults = private_faults(root, ())
    assert [fault.split()[2].rstrip(",") for fault in faults] == names


def test_private_allowances_cover_and_expire(tmp_path) -> None:
    root = plant(tmp_path, {"passes/ops.py": "import torch._ops"})
    assert private_faults(root, {(ANYWHERE, "torch._ops")}) == []
    assert len(private_faults(root, {(ANYWHERE, "torch._op")})) == 2
