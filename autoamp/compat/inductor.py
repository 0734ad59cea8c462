"""Casts in inductor's kernels: read from its schedule, and rounded where that is asked.

Inductor joins ops to kernels, which compute in fp32.  A value that is cast to 16 bits
and goes on in the same kernel is not rounded, unless inductor is told to.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config as _config
from torch._ops import OpOverload

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as _Pass
except ImportError:  # torch 2.11 takes any function here
    _Pass = object  # type: ignore[assignment, misc]

WRITTEN, PARTLY, INSIDE, REMOVED = "written", "partly", "inside", "removed"
"""What becomes of a cast.

`WRITTEN`: a kernel writes the cast's result to memory.  `PARTLY`: a kernel does, and
kernels read the value before the cast, too.  `INSIDE`: the cast and all its readers are
in the same kernels, which write no result of the cast.  `REMOVED`: inductor took the
cast out of the graph.
"""

_ROUNDING = "emulate_precision_casts"
_READING = "_post_fusion_custom_pass"
_KEY = "autoamp cast "
_ROUNDED = f"{_KEY}rounded"
_FORM = 1
"""The version of these notes, which are part of the keys of inductor's caches."""


@dataclass
class CastReading:
    """What one compilation by inductor makes of the casts of a graph.

    Attributes:
        names: the names of the casts in the graph that inductor is given.
        fates: each name to what becomes of the cast; empty where torch does not tell.
        rounded: whether kernels round at each cast; None where torch does not tell.
    """

    names: tuple[str, ...]
    fates: dict[str, str] = field(default_factory=dict)
    rounded: bool | None = None


@functools.cache
def _cpus_round() -> bool:
    """Whether kernels for CPUs round where inductor is told to; torch 2.11's do not.

    No setting tells, so that the source of the code that writes the kernels is read.
    """
    from torch._inductor.codegen import cpp

    try:
        return _ROUNDING in inspect.getsource(cpp)
    except OSError:  # torch was installed without its source
        return True


def inductor_backend(
    backend: Any, *, exact_casts: bool, reading: CastReading | None
) -> Callable[..., Any]:
    """Inductor as a Dynamo backend, with settings for one compilation only.

    Args:
        backend: "inductor", or the wrapper that `torch.compile` puts around it.
        exact_casts: whether kernels round at each cast.
        reading: the casts to read about.
    """
    from torch._inductor.compile_fx import compile_fx

    given = {} if backend == "inductor" else getattr(backend, "config", None)
    if given is None:  # the user's own settings are hidden in the wrapper
        whole: Callable[..., Any] = backend
        return whole
    patches = dict(given)
    if exact_casts:
        patches[_ROUNDING] = True
    taken = given.get(_READING) or _config._post_fusion_custom_pass
    if reading is not None and taken is None:
        patches[_READING] = _Reader(reading.names)

    def compile_patched(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # The backward, which may be compiled after this call, gets the patches too.
        return compile_fx(gm, list(inputs), config_patches=patches)

    return compile_patched


@contextlib.contextmanager
def reading_casts(reading: CastReading | None) -> Iterator[None]:
    """Fills in `reading` from the compilation in this region.

    Inductor keeps its counters with the code in its caches, and counts again when the
    code is taken from there.  So the counters tell of the casts in both cases.
    """
    yield
    found = counters["inductor"]  # Dynamo may have begun new ones in the meantime
    told = [key for key in found if key.startswith(_KEY)]
    for key in told:
        del found[key]
    if reading is not None and told:
        reading.rounded = _ROUNDED in told
        reading.fates = dict.fromkeys(reading.names, REMOVED)
        for key in told:
            fate, _, name = key.removeprefix(_KEY).partition(" ")
            if name in reading.fates:
                reading.fates[name] = fate


class _Reader(_Pass):
    """Reads of the casts named in the schedule of a forward, and changes nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def __call__(self, nodes: list[Any]) -> list[Any]:
        with contextlib.suppress(Exception):  # another torch: nothing is told
            from torch._inductor.virtualized import V

            if not V.graph.is_backward:
                fates = _fates(nodes, frozenset(self.names))
                rounds = _config.emulate_precision_casts and not (
                    "cpu" in V.graph.device_types and not _cpus_round()
                )
                told = [f"{_KEY}{fate} {name}" for name, fate in fates.items()]
                for key in (_ROUNDED if rounds else f"{_KEY}read", *told):
                    counters["inductor"][key] += 1
        return nodes

    def uuid(self) -> str:
        """A part of the key of inductor's caches: names differ from graph to graph."""
        return f"autoamp casts, form {_FORM}: {' '.join(self.names)}"


def _fates(kernels: Sequence[Any], names: Collection[str]) -> dict[str, str]:
    """What becomes of each cast that some kernel of a schedule holds."""
    found: dict[str, set[str]] = {}
    # A kernel with several nests of loops hands values on from nest to nest in memory.
    nests = [n for k in kernels for n in getattr(k, "outer_fused_nodes", None) or [k]]
    for nest in nests:
        # A template or a function of torch's reads its operands from memory, and makes
        # no cast.
        leaves = [
            leaf
            for leaf in nest.get_nodes()
            if leaf.node is not None and not leaf.is_template() and not leaf.is_extern()
        ]
        is_one = type(nest).__name__ in ("FusedSchedulerNode", "SchedulerNode")
        beside = frozenset(leaf.get_name() for leaf in leaves if is_one)
        for leaf in leaves:
            for node in leaf.node.origins:
                if node.target is not torch.ops.prims.convert_element_type.default:
                    continue
                # The node of our graph that inductor made this one of.
                sources = node.meta.get("from_node") or ()
                name = str(sources[0].name) if sources else ""
                if name in names:
                    found.setdefault(name, set()).update(_fate(node, leaf, beside))
    return {n: PARTLY if len(each) > 1 else min(each) for n, each in found.items()}


def _fate(cast: fx.Node, leaf: Any, beside: frozenset[str]) -> Iterator[str]:
    """What one part of a kernel makes of a cast.

    Args:
        beside: the parts of the kernel that read each other's values unwritten.
    """
    if not _makes(leaf.node, cast):
        yield INSIDE
        return
    users = [user for result in leaf.get_outputs() for user in result.users]
    readers = {user.get_name() for user in users if not user.is_weak}
    if readers & beside:
        yield INSIDE
    if readers - beside or not readers:
        yield WRITTEN


def _makes(result: Any, node: fx.Node) -> bool:
    """Whether a part of a kernel writes the value of `node`, or a view of it."""
    if result.get_origin_node() is node:
        return True
    views = all(
        isinstance(user.target, OpOverload)
        and user.target.is_view
        and _makes(result, user)
        for user in node.users
        if user in result.origins
    )
    return views and result.get_dtype() == node.meta["val"].dtype
