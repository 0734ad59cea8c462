"""Each rule of the verifier on graphs of a few nodes: what passes, what is refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoamp import compat
from autoamp.check.verify import Verifier
from autoamp.errors import VerificationError
from autoamp.graph_functions import low_weight, saturating_cast

ATEN = torch.ops.aten
LOW, HIGH = torch.bfloat16, torch.float32
TO_LOW, TO_HIGH = {"dtype": LOW}, {"dtype": HIGH}
CAST = ATEN._to_copy.default


def graph(
    *calls: tuple[Any, ...], given: Any = None, returns: Any = None, **attributes: Any
) -> fx.GraphModule:
    """A graph of (name, target, *arguments); strings name nodes, a dict is kwargs.

    Metadata is what running on zeros gives.  The last call is returned unless told.
    """
    made = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, value in (given or {"x": torch.zeros(4, 6)}).items():
        nodes[name] = made.placeholder(name)
        nodes[name].meta["val"] = value
    for name in attributes:
        nodes[name] = made.create_node("get_attr", name, name=name)
    for name, target, *arguments in calls:
        kwargs = arguments.pop() if arguments and type(arguments[-1]) is dict else {}
        args = fx.node.map_aggregate(
            tuple(arguments), lambda a: nodes[a] if type(a) is str else a
        )
        nodes[name] = made.create_node("call_function", target, args, kwargs, name)
        nodes[name].meta["val"] = _value(nodes[name])
    made.output([nodes[n] for n in returns or [calls[-1][0]]])
    root = nn.Module()
    for name, value in attributes.items():
        setattr(root, name, value)
    return fx.GraphModule(root, made)


def _value(node: fx.Node) -> Any:
    if node.target in compat.MODE_CHANGES:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if isinstance(node.target, compat.HigherOrderOperator):
        return args[-1]
    with torch.no_grad():
        return node.target(*args, **kwargs)


def verify(before: fx.GraphModule, after: fx.GraphModule, *denied: str) -> None:
    Verifier(before).verify(after, denied)


def refused(before: fx.GraphModule, after: fx.GraphModule, *denied: str) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(before, after, *denied)
    return str(caught.value)


# -- the interface ---------------------------------------------------------------------

RELU = ("relu", ATEN.relu.default, "x")


def test_the_inputs_and_outputs_stay_what_they_were() -> None:
    before = graph(RELU)
    verify(before, graph(RELU))
    other = graph(("relu", ATEN.relu.default, "y"), given={"y": torch.zeros(4, 6)})
    assert refused(before, other) == "the inputs changed from ['x'] to ['y']"
    twice = graph(RELU, returns=["relu", "relu"])
    assert refused(before, twice) == "the structure of the outputs changed"
    low = graph(("low", CAST, "x", TO_LOW), ("relu", ATEN.relu.default, "low"))
    assert refused(before, low) == (
        "the output dtypes changed from [torch.float32] to [torch.bfloat16]"
    )


# -- the program -----------------------------------------------------------------------


def test_what_nobody_reads_may_go_unless_it_has_an_effect() -> None:
    exp = ("exp", ATEN.exp.default, "x")
    verify(graph(exp, RELU), graph(RELU))
    draw = ("draw", ATEN.rand_like.default, "x")
    write = ("write", ATEN.neg_.default, "x")
    for effect, op in ((draw, "aten.rand_like.default"), (write, "aten.neg_.default")):
        message = f"{effect[0]} ({op}) got lost in the rewrite"
        assert refused(graph(effect, RELU), graph(RELU)) == message


def test_what_is_read_may_not_go() -> None:
    before = graph(("exp", ATEN.exp.default, "x"), ("relu", ATEN.relu.default, "exp"))
    message = "exp (aten.exp.default) got lost in the rewrite"
    assert refused(before, graph(RELU)) == message
    renamed = graph(
        ("exp_1", ATEN.exp.default, "x"), ("relu", ATEN.relu.default, "exp_1")
    )
    assert refused(before, renamed) == message


def test_a_view_may_be_repeated_under_other_names() -> None:
    view, relu = ("t", ATEN.t.default, "x"), ("relu", ATEN.relu.default, "t")
    exp = ("exp", ATEN.sum.default, "t")
    before = graph(view, relu, exp)
    repeated = (
        ("t_1", ATEN.t.default, "x"),
        ("relu", ATEN.relu.default, "t_1"),
        ("t_2", ATEN.t.default, "x"),
        ("exp", ATEN.sum.default, "t_2"),
    )
    verify(before, graph(*repeated))
    square = graph(("relu", ATEN.relu.default, "x"), ("exp", ATEN.sum.default, "x"))
    assert refused(before, square) == "t (aten.t.default) got lost in the rewrite"


def test_a_piece_may_be_taken_again_under_another_name() -> None:
    chunk = ("chunk", ATEN.chunk.default, "x", 2)
    before = graph(
        chunk,
        ("piece", operator.getitem, "chunk", 0),
        ("relu", ATEN.relu.default, "piece"),
    )
    again = graph(
        chunk,
        ("more", operator.getitem, "chunk", 0),
        ("relu", ATEN.relu.default, "more"),
    )
    verify(before, again)


def test_the_order_is_kept() -> None:
    exp = ("exp", ATEN.exp.default, "x")
    before = graph(exp, RELU, returns=["exp", "relu"])
    after = graph(RELU, exp, returns=["exp", "relu"])
    assert refused(before, after) == "the rewrite changed the order of the program"


def test_an_op_done_twice_under_one_name_is_no_second_run() -> None:
    """Casts are new names; a new name for anything else goes unread here."""
    before = graph(RELU)
    verify(before, graph(("low", CAST, "x", TO_LOW), RELU))


# -- dtypes ----------------------------------------------------------------------------


def test_recorded_dtypes_are_true() -> None:
    after = graph(RELU)
    relu = next(n for n in after.graph.nodes if n.name == "relu")
    relu.meta["val"] = relu.meta["val"].to(LOW)
    relu.meta["stack_trace"] = 'File "net.py", line 3\n  x.relu()'
    assert refused(graph(RELU), after) == (
        "relu (aten.relu.default, at net.py:3: x.relu()) is recorded as "
        "[torch.bfloat16] but computes [torch.float32]"
    )


def two(after: torch.dtype, **changed: Tensor) -> dict[str, Tensor]:
    return {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6, dtype=after), **changed}


def test_operands_of_different_dtypes_are_refused() -> None:
    hypot = ("hypot", ATEN.hypot.default, "x", "y")
    given = {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
    low = ("low", CAST, "x", TO_LOW)
    mixed = graph(low, ("hypot", ATEN.hypot.default, "low", "y"), given=given)
    assert refused(graph(hypot, given=given), mixed) == (
        "hypot (aten.hypot.default) has operands of different dtypes: "
        "self: torch.bfloat16, other: torch.float32"
    )


def test_a_kernel_that_widens_exactly_may_read_both() -> None:
    """What it gives is fp32; a half and a bf16 operand would be as well, and wrong."""
    add = ("add", ATEN.add.Tensor, "x", "y")
    given = {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
    low, to_half = ("low", CAST, "x", TO_LOW), {"dtype": torch.float16}
    verify(
        graph(add, given=given),
        graph(low, ("add", ATEN.add.Tensor, "low", "y"), given=given),
    )
    both = graph(
        low,
        ("half", CAST, "y", to_half),
        ("add", ATEN.add.Tensor, "low", "half"),
        given=given,
    )
    assert "different dtypes" in refused(graph(add, given=given), both)


def test_what_is_written_to_keeps_its_dtype() -> None:
    """`add_` reads fp32 beside the low tensor it writes to; `lerp_` does not."""
    given = {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}

    def written(op: Any, *rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        copy = ("copy", ATEN.clone.default, "x")
        low = ("low", CAST, "x", TO_LOW)
        low_copy = ("copy", ATEN.clone.default, "low")
        call = ("call", op, "copy", "y", *rest)
        use, up = ("use", ATEN.neg.default, "call"), ("up", CAST, "call", TO_HIGH)
        use_up = ("use", ATEN.neg.default, "up")
        return (
            graph(copy, call, use, given=given),
            graph(low, low_copy, call, up, use_up, given=given),
        )

    verify(*written(ATEN.add_.Tensor))
    assert "different dtypes" in refused(*written(ATEN.hypot.default))


def test_operands_in_lists_and_by_keyword_are_seen() -> None:
    given = {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
    low = ("low", CAST, "x", TO_LOW)
    cat = graph(("cat", ATEN.cat.default, ["x", "y"]), given=given)
    mixed = graph(low, ("cat", ATEN.cat.default, ["low", "y"]), given=given)
    assert refused(cat, mixed) == (
        "cat (aten.cat.default) has operands of different dtypes: "
        "tensors: torch.bfloat16, tensors[1]: torch.float32"
    )
    made = fx.Graph()
    x, y = made.placeholder("x"), made.placeholder("y")
    x.meta["val"], y.meta["val"] = given.values()
    cast = made.create_node("call_function", CAST, (x,), TO_LOW, "low")
    cast.meta["val"] = given["x"].to(LOW)
    add = made.create_node(
        "call_function", ATEN.hypot.default, (), {"self": cast, "other": y}, "add"
    )
    add.meta["val"] = given["x"]
    made.output([add])
    before = graph(("add", ATEN.hypot.default, "x", "y"), given=given)
    message = refused(before, fx.GraphModule({}, made))
    assert message.endswith("self: torch.bfloat16, other: torch.float32")


def test_what_the_user_mixed_is_the_users() -> None:
    given = two(LOW)
    add = ("add", ATEN.hypot.default, "x", "y")
    verify(graph(add, given=given), graph(add, given=given))
    other = graph(
        ("up", CAST, "y", TO_HIGH),
        ("low", CAST, "x", TO_LOW),
        ("add", ATEN.hypot.default, "low", "up"),
        given=given,
    )
    assert "different dtypes: self: torch.bfloat16" in refused(
        graph(add, given=given), other
    )


def test_what_must_stay_fp32_reads_fp32_too() -> None:
    """A comparison shows in no dtype that it compared rounded numbers."""
    before = graph(("gt", ATEN.gt.Scalar, "x", 1.0))
    after = graph(("low", CAST, "x", TO_LOW), ("gt", ATEN.gt.Scalar, "low", 1.0))
    Verifier(before).verify(after, ["gt"])
    with pytest.raises(VerificationError, match="must stay fp32 but reads") as caught:
        Verifier(before).verify(after, ["gt"], ["gt"])
    assert caught.value.nodes[0] == "gt"
    asked = ("total", ATEN.sum.default, "x"), {"dtype": torch.float32}
    summed = graph((*asked[0], asked[1]))
    low = graph(
        ("low", CAST, "x", TO_LOW), ("total", ATEN.sum.default, "low", asked[1])
    )
    Verifier(summed).verify(low, ["total"], ["total"])


def test_a_number_in_a_tensor_is_not_promoted_to() -> None:
    scalar = {"x": torch.zeros(4, 6), "y": torch.zeros(())}
    low = ("low", CAST, "x", TO_LOW)
    mul = ("mul", ATEN.atan2.default, "x", "y")
    up = ("up", CAST, "mul", TO_HIGH)
    before = graph(mul, ("relu", ATEN.relu.default, "mul"), given=scalar)
    low_mul = ("mul", ATEN.atan2.default, "low", "y")
    verify(
        before, graph(low, low_mul, up, ("relu", ATEN.relu.default, "up"), given=scalar)
    )
    numbers = {"x": torch.zeros(()), "y": torch.zeros(())}
    message = refused(graph(mul, given=numbers), graph(low, low_mul, given=numbers))
    assert message.endswith("self: torch.bfloat16, other: torch.float32")


def test_conversions_take_one_dtype_and_give_another() -> None:
    given = two(LOW)
    copy = ("copy_", ATEN.copy_.default, "y", "x")
    like = ("like", ATEN.type_as.default, "x", "y")
    before = graph(copy, like, given=given)
    after = graph(("low", CAST, "x", TO_LOW), copy, like, given=given)
    verify(before, after)
    after = graph(
        ("low", CAST, "x", TO_LOW),
        copy,
        ("like", ATEN.type_as.default, "low", "y"),
        given=given,
    )
    verify(before, after)


NORMS: dict[str, tuple[Any, list[Any], bool]] = {
    # op, arguments after the data, whether CUDA's kernel too takes fp32 parameters
    "layer_norm": (ATEN.layer_norm.default, [[6], "w", "b", 1e-5], False),
    "native_layer_norm": (ATEN.native_layer_norm.default, [[6], "w", "b", 1e-5], False),
    "group_norm": (ATEN.group_norm.default, [3, "w", "b", 1e-5], False),
    "batch_norm": (
        ATEN.batch_norm.default,
        ["w", "b", "m", "v", False, 0.1, 1e-5, False],
        True,
    ),
    "instance_norm": (
        ATEN.instance_norm.default,
        ["w", "b", "m", "v", False, 0.1, 1e-5, False],
        True,
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_take_fp32_parameters_beside_low_data(name: str, device: str) -> None:
    op, arguments, everywhere = NORMS[name]
    shape = (4, 6) if "layer" in name else (2, 6, 3)
    given = {"x": torch.zeros(*shape)}
    given |= {n: torch.ones(6) for n in "wbmv"}
    first = ("norm", op, "x", *arguments)
    after_norm = ("norm", op, "low", *arguments)
    if name.startswith("native"):
        before = graph(first, ("out", operator.getitem, "norm", 0), given=given)
        last = ("out", operator.getitem, "norm", 0)
    else:
        before = graph(first, ("out", ATEN.relu.default, "norm"), given=given)
        last = None
    calls = [("low", CAST, "x", TO_LOW), after_norm]
    calls += (
        [last, ("up", CAST, "out", TO_HIGH)]
        if last
        else [("up", CAST, "norm", TO_HIGH), ("out", ATEN.relu.default, "up")]
    )
    after = graph(*calls, given=given, returns=["up" if last else "out"])
    for node in after.graph.nodes:
        if device == "cuda" and isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = _OnCuda(node.meta["val"])
    if device == "cpu" or everywhere:
        verify(before, after)
    else:
        message = refused(before, after)
        assert "input: torch.bfloat16, weight: torch.float32" in message


class _OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU, for a machine that has none."""

    @staticmethod
    def __new__(cls, value: Tensor) -> _OnCuda:
        return torch.Tensor._make_subclass(cls, value)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def test_a_denied_node_keeps_its_dtype() -> None:
    exp = ("exp", ATEN.exp.default, "x")
    before = graph(exp, ("relu", ATEN.relu.default, "exp"))
    after = graph(
        ("low", CAST, "x", TO_LOW),
        ("exp", ATEN.exp.default, "low"),
        ("up", CAST, "exp", TO_HIGH),
        ("relu", ATEN.relu.default, "up"),
    )
    verify(before, after)
    verify(before, after, "relu")
    assert refused(before, after, "exp") == (
        "exp (aten.exp.default) must stay fp32 but its result became [torch.bfloat16]"
    )


# -- casts and writes ------------------------------------------------------------------

LOW_X = ("low", CAST, "x", TO_LOW)
WRITE = ("write", ATEN.neg_.default, "x")


def using(value: str, name: str = "to") -> tuple[Any, ...]:
    """A read of `value` that gives fp32 whatever it is."""
    return (name, ATEN.sum.default, value, TO_HIGH)


def test_a_cast_is_stale_after_a_write_to_what_it_was_made_of() -> None:
    before = graph(WRITE, using("x"))
    verify(before, graph(WRITE, LOW_X, using("low")))
    assert refused(before, graph(LOW_X, WRITE, using("low"))) == (
        "to (aten.sum.default) reads low, which is or views low, a cast of a tensor "
        "that was written to since"
    )
    saturating = ("low", saturating_cast, "x", LOW)
    assert "reads low" in refused(before, graph(saturating, WRITE, using("low")))


def test_a_write_to_something_else_leaves_a_cast_fresh() -> None:
    given = {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
    write = ("write", ATEN.neg_.default, "y")
    verify(
        graph(write, using("x"), given=given),
        graph(LOW_X, write, using("low"), given=given),
    )


def test_a_write_to_a_cast_is_lost() -> None:
    before = graph(("write", ATEN.neg_.default, "x"), using("x"))
    after = graph(LOW_X, ("write", ATEN.neg_.default, "low"), using("x"))
    assert refused(before, after) == (
        "write (aten.neg_.default) writes to low, which is or views low, a cast: the "
        "write is lost"
    )


def test_a_write_by_keyword_is_seen() -> None:
    before = graph(WRITE, using("x"))
    made = graph(LOW_X, WRITE, using("low"))
    write = next(n for n in made.graph.nodes if n.name == "write")
    write.kwargs, write.args = {"self": write.args[0]}, ()
    assert "written to since" in refused(before, made)


def test_the_models_own_cast_may_be_written_to() -> None:
    own = ("own", CAST, "x", TO_LOW)
    calls = (own, ("write", ATEN.neg_.default, "own"), using("own"))
    verify(graph(*calls), graph(*calls))


OFF, ON = ("off", compat.SET_GRAD, False), ("on", compat.SET_GRAD, True)


def test_a_cast_is_not_read_in_another_region() -> None:
    before = graph(OFF, using("x"))
    verify(before, graph(OFF, LOW_X, using("low")))
    assert refused(before, graph(LOW_X, OFF, using("low"))) == (
        "to (aten.sum.default) reads low, a cast made in another grad-mode or autocast "
        "region"
    )
    again = graph(OFF, ON, using("x"))
    assert "another grad-mode" in refused(again, graph(LOW_X, OFF, ON, using("low")))
    assert "another grad-mode" in refused(again, graph(OFF, LOW_X, ON, using("low")))


def test_a_use_of_a_weight_may_read_a_cast_made_in_another_region() -> None:
    use = ("use", low_weight, "x", "low")
    verify(graph(OFF, using("x")), graph(LOW_X, OFF, use, using("use")))


def test_a_returned_cast_is_read_by_all() -> None:
    """Inner readers of a value that is returned hang on what is returned."""
    exp = ("exp", ATEN.exp.default, "x")
    before = graph(exp, OFF, using("exp"), returns=["exp", "to"])
    after = graph(
        LOW_X,
        ("exp", ATEN.exp.default, "low"),
        ("up", CAST, "exp", TO_HIGH),
        OFF,
        using("up"),
        returns=["up", "to"],
    )
    verify(before, after)


def test_an_output_reads_a_cast_wherever_it_was_made() -> None:
    exp = ("exp", ATEN.exp.default, "x")
    before = graph(exp, OFF, ON, WRITE, returns=["exp"])
    after = graph(
        exp,
        ("low", CAST, "exp", TO_LOW),
        ("up", CAST, "low", TO_HIGH),
        OFF,
        ON,
        WRITE,
        returns=["up"],
    )
    verify(before, after)


@pytest.mark.parametrize("writes", [True, False])
def test_a_branch_that_may_write_is_given_no_cast(writes: bool) -> None:
    """A sub-graph that writes to what it is handed would write to the copy."""
    body = fx.GraphModule({}, _body(writes))
    cond = torch.ops.higher_order.cond
    given = {"x": torch.zeros(4, 6)}
    before = graph(("cond", cond, "body", "x"), using("x"), given=given, body=body)
    after = graph(
        LOW_X, ("cond", cond, "body", "low"), using("x"), given=given, body=body
    )
    for made in (before, after):
        call = next(n for n in made.graph.nodes if n.name == "cond")
        call.meta["val"] = given["x"]
    if writes:
        assert "writes to low, which is or views low" in refused(before, after)
    else:
        verify(before, after)


def _body(writes: bool) -> fx.Graph:
    made = fx.Graph()
    x = made.placeholder("x")
    made.output(made.call_method("neg_" if writes else "neg", (x,)))
    return made


# -- the recount -----------------------------------------------------------------------

OPS = {"exp": (100, 10), "argmax": (40, 4)}
DOWN, UP = {"x": 3, "exp": 5}, {"x": 7, "exp": 9}


def recount(before: fx.GraphModule, after: fx.GraphModule) -> int:
    return Verifier(before).recount(after, OPS, DOWN, UP)


def test_ops_and_casts_are_counted_as_they_run() -> None:
    exp = ("exp", ATEN.exp.default, "x")
    before = graph(exp)
    assert recount(before, before) == 100
    low = graph(LOW_X, ("exp", ATEN.exp.default, "low"), ("up", CAST, "exp", TO_HIGH))
    assert recount(before, low) == 3 + 10 + 9
    saturating = ("low", saturating_cast, "x", LOW)
    assert recount(before, graph(saturating, exp, returns=["exp"])) == 3 + 100


def test_the_models_own_casts_are_no_casts_of_ours() -> None:
    own = ("own", CAST, "x", TO_LOW)
    assert recount(graph(own), graph(own)) == 0


def test_an_op_without_float_results_runs_as_low_as_it_reads() -> None:
    before = graph(("argmax", ATEN.argmax.default, "x"))
    assert recount(before, before) == 40
    low = graph(LOW_X, ("argmax", ATEN.argmax.default, "low"))
    assert recount(before, low) == 3 + 4


def test_a_use_of_a_weight_is_no_cast() -> None:
    exp = ("exp", ATEN.exp.default, "x")
    after = graph(
        LOW_X,
        ("use", low_weight, "x", "low"),
        ("exp", ATEN.exp.default, "use"),
        ("up", CAST, "exp", TO_HIGH),
    )
    assert recount(graph(exp), after) == 3 + 10 + 9


def test_a_cast_of_a_returned_value_is_priced_as_the_value() -> None:
    """What is read of a returned value is cast from its up-cast."""
    exp = ("exp", ATEN.exp.default, "x")
    after = graph(
        LOW_X,
        ("exp", ATEN.exp.default, "low"),
        ("up", CAST, "exp", TO_HIGH),
        ("down", CAST, "up", TO_LOW),
        returns=["up", "down"],
    )
    up = next(n for n in after.graph.nodes if n.name == "up")
    up.meta["autoamp_cast"] = "up"
    assert recount(graph(exp), after) == 3 + 10 + 9 + 5
