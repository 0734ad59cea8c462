"""Each rule of the verifier on graphs of a few nodes: what passes, what is refused.

`small_graphs.py` says how a graph is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autoamp.errors import VerificationError
from tests.passes.check.door import Verifier
from tests.passes.check.small_graphs import HIGH, LOW, graph, zeros
from tests.says import says

MIXED = "different dtypes"
"""What is said of operands; the others say what was lost or read too late."""

RULES: list[tuple[str, str, str, str | list[str]]] = [
    # what holds; the graph before; the graph after; what is said, or "" if it passes
    ("a graph is itself", "r = relu(x)", "r = relu(x)", ""),
    ("outputs keep their number", "r = relu(x)", "r = relu(x); return r, r", "outputs"),
    (
        "outputs keep their dtype",
        "r = relu(x)",
        "l = low(x); r = relu(l)",
        ["output", "float32", "bfloat16"],
    ),
    (
        "a cast that nobody reads is nothing",
        "r = relu(x)",
        "l = low(x); r = relu(x)",
        "",
    ),
    # -- the program
    ("what nobody reads may go", "e = exp(x); r = relu(x)", "r = relu(x)", ""),
    (
        "a random draw may not go",
        "draw = rand_like(x); r = relu(x)",
        "r = relu(x)",
        ["draw", "aten.rand_like", "lost"],
    ),
    (
        "a write may not go",
        "write = neg_(x); r = relu(x)",
        "r = relu(x)",
        ["write", "aten.neg_", "lost"],
    ),
    (
        "what is read may not go",
        "e = exp(x); r = relu(e)",
        "r = relu(x)",
        ["aten.exp", "lost"],
    ),
    (
        "nor come back under another name",
        "e = exp(x); r = relu(e)",
        "e_1 = exp(x); r = relu(e_1)",
        ["aten.exp", "lost"],
    ),
    (
        "a view may be repeated under other names",
        "v = t(x); r = relu(v); s = sum(v)",
        "v_1 = t(x); r = relu(v_1); v_2 = t(x); s = sum(v_2)",
        "",
    ),
    (
        "a view may not be left out",
        "v = t(x); r = relu(v); s = sum(v)",
        "r = relu(x); s = sum(x)",
        ["aten.t", "lost"],
    ),
    (
        "a piece may be taken again",
        "c = chunk(x, 2); p = item(c, 0); r = relu(p)",
        "c = chunk(x, 2); q = item(c, 0); r = relu(q)",
        "",
    ),
    (
        "the order is kept",
        "e = exp(x); r = relu(x); return e, r",
        "r = relu(x); e = exp(x); return e, r",
        "order",
    ),
    # -- dtypes of operands
    (
        "operands have one dtype",
        "h = hypot(x, y)",
        "l = low(x); h = hypot(l, y)",
        [MIXED, "aten.hypot", "self: torch.bfloat16", "other: torch.float32"],
    ),
    (
        "also in lists",
        "c = cat([x, y])",
        "l = low(x); c = cat([l, y])",
        [MIXED, "tensors: torch.bfloat16", "tensors[1]: torch.float32"],
    ),
    (
        "also by keyword",
        "h = hypot(x, y)",
        "l = low(x); h = hypot(self=l, other=y)",
        [MIXED, "self: torch.bfloat16", "other: torch.float32"],
    ),
    (
        "a kernel that widens exactly may read both",
        "a = add(x, y)",
        "l = low(x); a = add(l, y)",
        "",
    ),
    (
        "but not a half beside a bf16: their sum is fp32, and wrong",
        "a = add(x, y)",
        "l = low(x); h = half(y); a = add(l, h)",
        MIXED,
    ),
    (
        "a low tensor may be written to with fp32",
        "c = clone(x); a = add_(c, y); n = neg(a)",
        "l = low(x); c = clone(l); a = add_(c, y); u = up(a); n = neg(u)",
        "",
    ),
    (
        "an op that does not write may not read both",
        "c = clone(x); a = hypot(c, y); n = neg(a)",
        "l = low(x); c = clone(l); a = hypot(c, y); u = up(a); n = neg(u)",
        MIXED,
    ),
    # -- writes: a cast is stale after one
    (
        "a cast after the write is fresh",
        "w = neg_(x); s = wide(x)",
        "w = neg_(x); l = low(x); s = wide(l)",
        "",
    ),
    (
        "a cast before it is stale",
        "w = neg_(x); s = wide(x)",
        "l = low(x); w = neg_(x); s = wide(l)",
        ["s (aten.sum", "reads l", "written"],
    ),
    (
        "also a saturating one",
        "w = neg_(x); s = wide(x)",
        "l = saturating(x); w = neg_(x); s = wide(l)",
        ["reads l", "written"],
    ),
    (
        "also where the write is by keyword",
        "w = neg_(x); s = wide(x)",
        "l = low(x); w = neg_(self=x); s = wide(l)",
        ["reads l", "written"],
    ),
    (
        "a write to something else leaves it fresh",
        "w = neg_(y); s = wide(x)",
        "l = low(x); w = neg_(y); s = wide(l)",
        "",
    ),
    (
        "a write to a cast is lost",
        "w = neg_(x); s = wide(x)",
        "l = low(x); w = neg_(l); s = wide(x)",
        ["w (aten.neg_", "writes to l", "lost"],
    ),
    (
        "the model's own cast may be written to",
        "own = low(x); w = neg_(own); s = wide(own)",
        "own = low(x); w = neg_(own); s = wide(own)",
        "",
    ),
    # -- regions
    (
        "a cast of the region may be read",
        "f = off(); s = wide(x)",
        "f = off(); l = low(x); s = wide(l)",
        "",
    ),
    (
        "one from before a region may not",
        "f = off(); s = wide(x)",
        "l = low(x); f = off(); s = wide(l)",
        ["s (aten.sum", "reads l", "region"],
    ),
    (
        "nor over a region",
        "f = off(); o = on(); s = wide(x)",
        "l = low(x); f = off(); o = on(); s = wide(l)",
        ["reads l", "region"],
    ),
    (
        "nor after its region",
        "f = off(); o = on(); s = wide(x)",
        "f = off(); l = low(x); o = on(); s = wide(l)",
        ["reads l", "region"],
    ),
    (
        "a use of a weight may: it is a node of its own",
        "f = off(); s = wide(x)",
        "l = low(x); f = off(); u = use(x, l); s = wide(u)",
        "",
    ),
    (
        "what is returned is read by all",
        "e = exp(x); f = off(); s = wide(e); return e, s",
        "l = low(x); e = exp(l); u = up(e); f = off(); s = wide(u); return u, s",
        "",
    ),
    (
        "an output reads a cast wherever it was made",
        "e = exp(x); f = off(); o = on(); w = neg_(x); return e",
        "e = exp(x); l = low(e); u = up(l); f = off(); o = on(); w = neg_(x); return u",
        "",
    ),
]


def check(before: fx.GraphModule, after: fx.GraphModule, told: Any, *more: Any) -> None:
    """Verifies a graph, which passes where nothing is told."""
    if not told:
        Verifier(before).verify(after, *(more or [()]))
        return
    with pytest.raises(VerificationError) as raised:
        Verifier(before).verify(after, *(more or [()]))
    says(raised, *(told if isinstance(told, list) else [told]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
def test_a_rule_holds(rule: tuple[str, str, str, str | list[str]]) -> None:
    _, before, after, told = rule
    given = zeros(x=HIGH, y=HIGH)
    check(graph(before, given), graph(after, given), told)


def test_the_inputs_stay_what_they_were() -> None:
    other = graph("r = relu(z)", zeros(z=HIGH))
    check(graph("r = relu(x)"), other, ["inputs", "['x']", "['z']"])


def test_recorded_dtypes_are_true() -> None:
    after = graph("r = relu(x)")
    (relu,) = after.graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    relu.meta["val"] = relu.meta["val"].to(LOW)
    relu.meta["stack_trace"] = 'File "net.py", line 3\n  x.relu()'
    told = ["r (aten.relu", "net.py:3", "bfloat16", "float32"]
    check(graph("r = relu(x)"), after, told)


def test_what_the_user_mixed_is_the_users() -> None:
    given, mixed = zeros(x=HIGH, y=LOW), "h = hypot(x, y)"
    check(graph(mixed, given), graph(mixed, given), "")
    swapped = graph("u = up(y); l = low(x); h = hypot(l, u)", given)
    check(graph(mixed, given), swapped, [MIXED, "self: torch.bfloat16"])


def test_conversions_take_one_dtype_and_give_another() -> None:
    given = zeros(x=HIGH, y=LOW)
    before = graph("c = copy_(y, x); k = type_as(x, y)", given)
    for read in "xl":
        after = f"l = low(x); c = copy_(y, x); k = type_as({read}, y)"
        check(before, graph(after, given), "")


def test_what_must_stay_fp32_reads_fp32_too() -> None:
    """A comparison shows in no dtype that it compared rounded numbers."""
    before, after = graph("g = gt(x, 1.0)"), graph("l = low(x); g = gt(l, 1.0)")
    check(before, after, "", ["g"])
    check(before, after, ["fp32", "g (aten.gt"], ["g"], ["g"])
    with pytest.raises(VerificationError) as raised:
        Verifier(before).verify(after, ["g"], ["g"])
    assert raised.value.nodes[0] == "g"
    # A sum that is asked for in fp32 may read what is low.
    check(graph("s = wide(x)"), graph("l = low(x); s = wide(l)"), "", ["s"], ["s"])


def test_a_denied_node_keeps_its_dtype() -> None:
    before = graph("e = exp(x); r = relu(e)")
    after = graph("l = low(x); e = exp(l); u = up(e); r = relu(u)")
    check(before, after, "", ["r"])
    check(before, after, ["e (aten.exp", "fp32", "bfloat16"], ["e"])


def test_a_number_in_a_tensor_is_not_promoted_to() -> None:
    before = "m = atan2(x, y); r = relu(m)"
    after = "l = low(x); m = atan2(l, y); u = up(m); r = relu(u)"
    scalar = {"x": torch.zeros(4, 6), "y": torch.zeros(())}
    check(graph(before, scalar), graph(after, scalar), "")
    numbers = {"x": torch.zeros(()), "y": torch.zeros(())}
    told = [MIXED, "self: torch.bfloat16", "other: torch.float32"]
    check(graph(before, numbers), graph(after, numbers), told)


NORMS: dict[str, tuple[str, bool]] = {
    # arguments after the data, and whether CUDA's kernel too takes fp32 parameters
    "layer_norm": ("[6], w, b, 1e-5", False),
    "native_layer_norm": ("[6], w, b, 1e-5", False),
    "group_norm": ("3, w, b, 1e-5", False),
    "batch_norm": ("w, b, m, v, False, 0.1, 1e-5, False", True),
    "instance_norm": ("w, b, m, v, False, 0.1, 1e-5, False", True),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_take_fp32_parameters_beside_low_data(name: str, device: str) -> None:
    arguments, everywhere = NORMS[name]
    given = {"x": torch.zeros((4, 6) if "layer" in name else (2, 6, 3))}
    given |= {parameter: torch.ones(6) for parameter in "wbmv"}
    first = "o = item(n, 0); " if name.startswith("native") else "o = clone(n); "
    before = graph(f"n = {name}(x, {arguments}); {first} return o", given)
    text = f"l = low(x); n = {name}(l, {arguments}); {first} u = up(o); return u"
    after = graph(text, given)
    for node in after.graph.nodes:
        if device == "cuda" and isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = _OnCuda(node.meta["val"])
    told = [MIXED, "input: torch.bfloat16", "weight: torch.float32"]
    check(before, after, "" if device == "cpu" or everywhere else told)


class _OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU, for a machine that has none."""

    @staticmethod
    def __new__(cls, value: Tensor) -> _OnCuda:
        return torch.Tensor._make_subclass(cls, value)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


@pytest.mark.parametrize("writes", [True, False])
def test_a_branch_that_may_write_is_given_no_cast(writes: bool) -> None:
    """A sub-graph that writes to what it is handed would write to the copy."""
    made = fx.Graph()
    x = made.placeholder("x")
    made.output(made.call_method("neg_" if writes else "neg", (x,)))
    body, given = fx.GraphModule({}, made), zeros(x=HIGH)
    before = graph("c = cond(body, x); s = wide(x)", given, body=body)
    after = graph("l = low(x); c = cond(body, l); s = wide(x)", given, body=body)
    for each in (before, after):
        (call,) = (n for n in each.graph.nodes if n.name == "c")
        call.meta["val"] = given["x"]
    check(before, after, "writes to l" if writes else "")


# -- the recount -----------------------------------------------------------------------

OPS = {"e": (100, 10), "a": (40, 4)}
DOWN, UP = {"x": 3, "e": 5}, {"x": 7, "e": 9}

COUNTED: list[tuple[str, str, str, int]] = [
    ("an op in fp32", "e = exp(x)", "e = exp(x)", 100),
    ("low, with casts", "e = exp(x)", "l = low(x); e = exp(l); u = up(e)", 3 + 10 + 9),
    (
        "a saturating cast",
        "e = exp(x)",
        "l = saturating(x); e = exp(x); return e",
        3 + 100,
    ),
    ("the model's own cast", "own = low(x)", "own = low(x)", 0),
    ("indices in fp32", "a = argmax(x)", "a = argmax(x)", 40),
    (
        "indices, as low as what they read",
        "a = argmax(x)",
        "l = low(x); a = argmax(l)",
        3 + 4,
    ),
    (
        "a use of a weight is no cast",
        "e = exp(x)",
        "l = low(x); n = use(x, l); e = exp(n); u = up(e)",
        3 + 10 + 9,
    ),
    (
        "a cast of a returned value is priced as the value",
        "e = exp(x)",
        "l = low(x); e = exp(l); u = up(e); d = low(u); return u, d",
        3 + 10 + 9 + 5,
    ),
]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case[0])
def test_ops_and_casts_are_counted_as_they_run(case: tuple[str, str, str, int]) -> None:
    _, before, after, cost = case
    emitted = graph(after)
    for node in emitted.graph.nodes:
        if node.name == "u":
            node.meta["autoamp_cast"] = "up"
    assert Verifier(graph(before)).recount(emitted, OPS, DOWN, UP) == cost
