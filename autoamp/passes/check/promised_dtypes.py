"""Casts results whose dtype is not the dtype that the graph promises.

The passes know dtypes from stand-in tensors, but a real kernel may return another
dtype: the kernel of a custom op whose `register_fake` is wrong, or a kernel of torch's
that takes another path for some data.  The calls after such a kernel would raise, or
would silently run in fp32.  So the first run of a graph goes node by node and compares
each result with its node; a result of another dtype is cast, in that run and in all
later runs.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import fx

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, short_name
from autoamp.errors import VerificationError
from autoamp.passes.check import allowed_changes
from autoamp.passes.check.compare import differences
from autoamp.passes.functions import dtypes_in, op_with_its_state, with_dtypes
from autoamp.passes.functions.casts import Dtypes
from autoamp.passes.graph_record import Prepared
from autoamp.passes.node_by_node import Observer, Runner
from autoamp.passes.ops import base_name
from autoamp.passes.options import PassOptions
from autoamp.passes.see.nodes import source_line
from autoamp.passes.write.bindings import with_bindings
from autoamp.passes.write.copied import copied

_LOW = frozenset(LOW_DTYPES.values())


class Broken(NamedTuple):
    """A result whose dtype is not the dtype that its node promises.

    Attributes:
        given: the dtypes of the result.
        sentence: names the op, its source line and the dtypes.
        denied: the op's name for `deny=`, which would keep the op in fp32; "" where the
            op reads fp32 already.
    """

    given: Dtypes
    sentence: str
    denied: str

    def message(self, options: PassOptions) -> str:
        """The sentence, with the option that keeps the op in fp32."""
        if not self.denied:
            return self.sentence
        advice = options.advice("deny", [self.denied])
        return f"{self.sentence}; {advice} keeps {self.denied} in fp32"


class Held(Observer):
    """Casts each result to the dtype that its node promises.

    Attributes:
        broken: the nodes whose results had another dtype and were cast.
    """

    def __init__(self) -> None:
        self.broken: dict[fx.Node, Broken] = {}

    def after(self, _: fx.Interpreter, n: fx.Node, value: Any) -> Any:
        """The value, cast if its dtype is not the dtype of its node."""
        if n.op != "call_function" or n.target is operator.getitem:
            return value
        said, given = dtypes_in(n.meta.get("val")), dtypes_in(value)
        if given == said:
            return value
        # A part whose dtype the node leaves open is skipped.
        pairs = zip(said, given, strict=True) if len(said) == len(given) else ()
        differ = dict.fromkeys(
            f"{short_name(b)} where {short_name(a)} was expected"
            for a, b in pairs
            if a is not None and b is not None and a != b
        )
        # A result of the graph may have that dtype without autoamp, too.
        returned = any(user.op == "output" for user in n.users)
        if not differ or (returned and not _reads_low(n)):
            return value
        self.broken[n] = _broken(n, given, differ)
        return with_dtypes(value, said)


def hold_first_run(
    prepared: Prepared, options: PassOptions, tell: Callable[[str], None]
) -> None:
    """Makes the first run of a graph check the dtypes of all results.

    Where the run finds a result of another dtype, a cast is put into the graph behind
    the result's node, and the next run checks the edited graph.

    Args:
        options: the options by which the user may keep an op in fp32.
        tell: called with a sentence about each result that has to be cast.

    Raises:
        VerificationError: under `strict`, a check found the graph with the casts to be
            another program; elsewhere each run then goes on node by node.
    """
    plain, lock = prepared.run, threading.Lock()

    def first(*args: Any) -> Any:
        nonlocal plain
        ran, held = prepared.gm, Held()
        results = Runner(ran, [held]).run(*args)
        with lock:
            if prepared.gm is not ran:
                return results  # another thread has put casts in meanwhile
            if not held.broken:
                # One clean run is enough: from here the graph's own code runs, with no
                # Python between ops.
                prepared.run = plain
                return results
            told = [each.message(options) for each in held.broken.values()]
            try:
                amended = _with_casts(ran, held.broken)
                # The edit is checked as a pass is: it happens at a call, behind all
                # passes, and may put casts behind the broken nodes alone.
                broken = frozenset(n.name for n in held.broken)
                differences(ran, amended, allowed_changes.held(broken))
                code = with_bindings(amended)
                compat.make_code(code)
            except VerificationError as error:
                if options.strict:
                    raise
                told.append(
                    "the graph runs node by node at every call, to cast such results: "
                    f"{error}"
                )
            else:
                prepared.gm, plain = amended, code.forward
            for problem in told:
                if problem not in prepared.notes:
                    prepared.notes += (problem,)
                    tell(problem)
        return results

    prepared.run = first


def _reads_low(n: fx.Node) -> bool:
    """Whether the pass changed a call: it reads a low value, or a function of ours."""
    if getattr(n.target, "__module__", "").startswith("autoamp."):
        return True
    read = [
        d for operand in n.all_input_nodes for d in dtypes_in(operand.meta.get("val"))
    ]
    return not _LOW.isdisjoint(read)


def _broken(n: fx.Node, given: Dtypes, differ: Iterable[str]) -> Broken:
    op = op_with_its_state(n.target)
    name = getattr(op, "__name__", str(op))
    if isinstance(op, compat.OpOverload):
        name = base_name(op).removeprefix("aten::")
    source = source_line(n)
    at = f" (at {source})" if source else ""
    which = ", ".join(differ)
    sentence = f"the kernel of {name}{at} returns {which}; autoamp casts the result"
    return Broken(given, sentence, name if _reads_low(n) else "")


def _with_casts(gm: fx.GraphModule, broken: Mapping[fx.Node, Broken]) -> fx.GraphModule:
    """A copy of `gm` in which the dtypes of broken nodes are corrected, and cast."""
    amended, copies = copied(gm)
    for old, found in broken.items():
        if old not in copies:
            continue
        node = copies[old]
        promised, readers = node.meta["val"], [*node.users]
        with amended.graph.inserting_after(node):
            # `with_dtypes` and not `_to_copy`: an op may have several results, some no
            # tensors.
            cast = amended.graph.call_function(with_dtypes, (node, dtypes_in(promised)))
        cast.meta = dict(node.meta)
        node.meta = {**node.meta, "val": with_dtypes(promised, found.given)}
        # The cast itself goes on reading the node.
        for reader in readers:
            reader.replace_input_with(node, cast)
    for name, body in gm.named_children():
        if isinstance(body, fx.GraphModule):
            setattr(amended, name, _with_casts(body, broken))
    amended.graph.lint()
    amended.recompile()
    return amended
