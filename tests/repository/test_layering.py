"""Imports go down the layers, and private torch names stay in one module."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection, Iterable
from pathlib import Path

import networkx as nx
import pytest
import torch

from tests.repository import imports

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "autoamp"
BESIDE = (
    REPO / "autoamp_autoload.py",
    REPO / "autoamp_cli",
    REPO / "autoamp_heat.py",
)
"""Modules and packages of the project that are not in the package `autoamp`."""

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"autoamp_heat"}),
    frozenset({"ask.progress", "messages", "printable"}),
    frozenset({"errors", "dtypes"}),
    frozenset({"compat"}),
    frozenset({"foreign", "op_names", "kernels.functions"}),
    frozenset({"graph_functions", "training.scale", "ops"}),
    frozenset({"counted", "rules", "saved"}),
    frozenset({"kernels.algebra"}),
    frozenset({"kernels.meaning"}),
    frozenset({"kernels.table"}),
    frozenset({"pass_options"}),
    frozenset({"options"}),
    frozenset({"trace"}),
    frozenset({"analyse"}),
    frozenset({"place"}),
    frozenset({"check", "rewrite"}),
    frozenset({"kernels"}),
    frozenset({"calibrate"}),
    frozenset({"pipeline"}),
    frozenset({"node_by_node"}),
    frozenset({"overflow"}),
    frozenset({"inspect", "weights"}),
    frozenset({"training"}),
    frozenset({"snapshot.files"}),
    frozenset({"snapshot.write"}),
    frozenset({"capture"}),
    frozenset({"model"}),
    frozenset({"ask"}),
    frozenset({"budget", "calibrate.tune", "exported", "snapshot"}),
    frozenset({"benchmark"}),
    frozenset({"planning"}),
    frozenset({"api", "questions"}),
    frozenset({"auto"}),
    frozenset({"__init__", "autoamp_cli"}),
    frozenset({"cli"}),
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
    ("rewrite.casts", "rewrite.emitted"),
    ("rewrite.copied",),
    ("kernels.fuse",),
    (
        "check.changes",
        "check.compare",
        "check.numbers",
        "check.operands",
        "check.standin",
        "check.verify",
    ),
)
"""No group reaches another, even through a third: the check of a graph must not learn
what is legal from the code that made the graph."""

ANYWHERE = "*"

PRIVATE_TORCH_ALLOWED: dict[tuple[str, str], str] = {
    (ANYWHERE, "torch._ops.OpOverload"): (
        "the type of every ATen node's target; torch has no public name for it"
    ),
    (ANYWHERE, "torch.utils._pytree"): (
        "how FX flattens arguments; torch has no public name for it"
    ),
}
"""(module, torch name) to the reason why it is not in `compat`.

A name covers everything below it; an entry that no line uses any more fails too.
"""


ATTRIBUTES_ALLOWED: dict[tuple[str, str], str] = {
    ("autoamp.model.conversion", "_replicate_for_data_parallel"): (
        "what nn.DataParallel calls; a method of that name is how it is met"
    )
}
"""(module, attribute) to the reason why it is not in `compat`."""


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
    return frozenset(n for n in names | marks if imports.is_private(n))


def layer_of(module: str) -> int | None:
    """The row of `autoamp.a.b`, or None where `a` is in no row."""
    unit = unit_of(module)
    rows = [row for row, units in enumerate(LAYERS) if unit in units]
    return rows[0] if rows else None


def unit_of(module: str) -> str:
    """`autoamp.place.mincut` belongs to `place`; the root to `__init__`."""
    top, *parts = module.split(".")
    if top != PACKAGE.name:
        return top
    inside = (".".join(parts[:n]) for n in range(2, len(parts) + 1))
    lower = (p for part in inside for p in _PARTS if fnmatch.fnmatch(part, p))
    return next(lower, [*parts, "__init__"][0])


def layering_faults(root: Path, beside: Collection[Path] = ()) -> list[str]:
    """What is wrong with the imports of the package whose folder is `root`.

    Args:
        beside: the project's modules that are not in the package.
    """
    modules = imports.modules_of(root, beside)
    edges = imports.imports_of(root, beside)
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


def cycle_faults(edges: Iterable[imports.Import]) -> list[str]:
    """Loops of modules that import each other, late imports included."""
    graph = nx.DiGraph((edge.source, edge.target) for edge in edges)
    loops = (sorted(part) for part in nx.strongly_connected_components(graph))
    return [f"import loop: {' <-> '.join(loop)}" for loop in loops if len(loop) > 1]


def apart_faults(root: str, edges: Iterable[imports.Import]) -> list[str]:
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
    root: Path,
    allowed: Iterable[tuple[str, str]],
    free: str = "compat",
    beside: Collection[Path] = (),
) -> list[str]:
    """Private torch names outside `free`, and allowances that nothing needs."""
    faults, unused = [], set(allowed)
    attributes = private_attributes()
    for module, path in imports.modules_of(root, beside).items():
        if unit_of(module) == free:
            continue
        faults += [
            f"{use}: private attributes of torch's objects belong in `{free}`"
            for use in imports.attribute_uses(module, path, attributes)
            if (module, use.name) not in ATTRIBUTES_ALLOWED
        ]
        for use in imports.private_torch_uses(module, path):
            covering = {
                entry
                for entry in allowed
                if entry[0] in (module, ANYWHERE)
                and (use.name + ".").startswith(entry[1] + ".")
            }
            unused -= covering
            if not covering:
                faults.append(f"{use}: private torch names belong in `{free}`")
    return faults + [f"allowance {entry} is no longer needed" for entry in unused]


def test_imports_go_down_the_layers() -> None:
    assert layering_faults(PACKAGE, BESIDE) == []


def test_private_torch_names_stay_in_compat() -> None:
    assert private_faults(PACKAGE, PRIVATE_TORCH_ALLOWED, beside=BESIDE) == []


def test_every_allowance_has_a_reason() -> None:
    assert all(len(reason) > 10 for reason in PRIVATE_TORCH_ALLOWED.values())


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
    "ops.py": "import torch\nfrom autoamp.errors import X",
    "analyse/facts.py": "from autoamp.ops import Y",
    "analyse/classify.py": "from autoamp.analyse.facts import Z",
    "rewrite/casts.py": "from autoamp.analyse import facts",
    "check/verify.py": "from autoamp.ops import Y",
    "pipeline.py": "from autoamp.rewrite.casts import c, verify",
    "cli.py": "import autoamp.pipeline",
    "__init__.py": "from autoamp.pipeline import run",
}


def test_a_legal_tree_has_no_faults(tmp_path) -> None:
    assert layering_faults(plant(tmp_path, LEGAL)) == []


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"errors.py": "from autoamp.ops import x"}, "higher layer"),
        ({"errors.py": "def f():\n    import autoamp.cli"}, "higher layer"),
        ({"errors.py": "from .ops import x"}, "higher layer"),
        (
            {"analyse/facts.py": "from ..pipeline import x"},
            "autoamp.analyse.facts:1 imports autoamp.pipeline: that is a higher layer",
        ),
        (
            {"ops.py": "import importlib\nimportlib.import_module('autoamp.cli')"},
            "autoamp.ops:2 imports autoamp.cli: that is a higher layer",
        ),
        (
            {"ops.py": "if TYPE_CHECKING:\n    from autoamp.place import x"}
            | {"place/mincut.py": ""},
            "higher layer",
        ),
        ({"cli.py": "import autoamp"}, "package root"),
        ({"cli.py": "from autoamp import convert"}, "package root"),
        ({"cli.py": "from . import convert"}, "package root"),
        ({"dtypes.py": "from autoamp.errors import X"}, "same layer"),
        (
            {"inspect/a.py": "import autoamp.weights.b", "weights/b.py": ""},
            "same layer",
        ),
        (
            {"analyse/facts.py": "from autoamp.analyse.classify import x"},
            "import loop: autoamp.analyse.classify <-> autoamp.analyse.facts",
        ),
        (
            {"check/verify.py": "from autoamp.rewrite.casts import x"},
            "autoamp.check.verify reaches autoamp.rewrite.casts",
        ),
        (
            {
                "check/verify.py": "from autoamp.rewrite.helper import x",
                "rewrite/helper.py": "from autoamp.rewrite.casts import x",
            },
            "autoamp.check.verify -> autoamp.rewrite.helper -> autoamp.rewrite.casts",
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
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch._guards as g\ng.x", ["torch._guards"]),
        ("from torch import _C", ["torch._C"]),
        ("from torch._ops import OpOverload as O\nO.x", ["torch._ops.OpOverload"]),
        ("import torch.fx as fx\nfx._pytree.y", ["torch.fx._pytree.y"]),
        ("from torch.utils import data\ndata._utils", ["torch.utils.data._utils"]),
        ("import torch\ntorch.nn.Linear\nx = torch.__version__", []),
        ("import torch\ntorch.ops.aten._to_copy.default", []),  # an op, not an API
        ("import os\nos._exit\nself._torch = 1", []),
    ],
)
def test_a_private_name_is_found(tmp_path, code: str, names: list[str]) -> None:
    path = tmp_path / "ops.py"
    path.write_text(code)
    found = [use.name for use in imports.private_torch_uses("autoamp.ops", path)]
    assert found == names


@pytest.mark.parametrize(
    "code", ["p._version", "node.target._schema.name", "optimizer._opt_called = True"]
)
def test_a_private_attribute_is_found(tmp_path, code: str) -> None:
    root = plant(tmp_path, {"ops.py": code, "compat.py": code})
    (fault,) = private_faults(root, ())
    assert fault.startswith("autoamp.ops:1 uses _")


def test_an_attribute_of_ones_own_may_have_any_name(tmp_path) -> None:
    root = plant(tmp_path, {"ops.py": "self._version = 1\nother._mine = 2"})
    assert private_faults(root, ()) == []


def test_a_loop_through_a_module_beside_the_package_is_found(tmp_path) -> None:
    root = plant(tmp_path, {"auto/switch.py": "import autoamp_autoload"})
    beside = tmp_path / "autoamp_autoload.py"
    beside.write_text("def start():\n    from autoamp.auto.switch import x")
    assert layering_faults(root, [beside]) == [
        "autoamp.auto.switch:1 imports autoamp_autoload: that is a higher layer",
        "import loop: autoamp.auto.switch <-> autoamp_autoload",
    ]


def test_private_allowances_cover_and_expire(tmp_path) -> None:
    root = plant(
        tmp_path, {"ops.py": "import torch._ops", "compat.py": "import torch._guards"}
    )
    assert len(private_faults(root, ())) == 1
    assert private_faults(root, {("autoamp.ops", "torch._ops")}) == []
    assert private_faults(root, {(ANYWHERE, "torch._ops")}) == []
    assert len(private_faults(root, {(ANYWHERE, "torch._op")})) == 2
    (stale,) = private_faults(
        root, {("autoamp.ops", "torch._ops"), ("autoamp.ops", "torch._C")}
    )
    assert "no longer needed" in stale
