"""Stand-in tensors: true dtypes, sizes and aliasing, whatever the metadata says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.functions import checkpointed
from tests.passes.check.door import Memo, StandIns
from tests.says import says

ATEN = torch.ops.aten
META = torch.device("meta")
LOW = torch.bfloat16


def graph(*calls: tuple[Any, ...], given: Any = None, **attributes: Any) -> StandIns:
    """The stand-ins of a graph of (name, target, *arguments); strings name nodes.

    A dict at the end of a call holds its keyword arguments.  No call has metadata.
    """
    made = fx.Graph()
    nodes = {"x": made.placeholder("x")}
    nodes["x"].meta["val"] = torch.zeros(4, 6) if given is None else given
    for name in attributes:
        nodes[name] = made.get_attr(name)
        nodes[name].name = name
    for name, target, *arguments in calls:
        kwargs = arguments.pop() if arguments and type(arguments[-1]) is dict else {}
        args = tuple(nodes.get(a, a) if type(a) is str else a for a in arguments)
        nodes[name] = made.create_node("call_function", target, args, kwargs, name)
    made.output([nodes[c[0]] for c in calls])
    root = nn.Module()
    for name, value in attributes.items():
        setattr(root, name, value)
    return StandIns(fx.GraphModule(root, made), {})


def test_dtypes_sizes_and_strides_come_from_running() -> None:
    run = graph(
        ("low", ATEN._to_copy.default, "x", {"dtype": torch.bfloat16}),
        ("turned", ATEN.t.default, "low"),
        ("sums", ATEN.sum.dim_IntList, "turned", [0]),
        given=torch.zeros(6, 4).t(),
    )
    assert run.values["x"].stride() == (1, 4)
    turned = run.values["turned"]
    assert (turned.dtype, turned.shape, turned.stride()) == (LOW, (6, 4), (4, 1))
    assert run.values["sums"].shape == (4,)
    assert run.values["output"] == [run.values[n] for n in ("low", "turned", "sums")]
    assert all(v.device == META for n, v in run.values.items() if n != "output")
    assert run.nodes.keys() == run.values.keys()


def test_views_share_storage_and_copies_do_not() -> None:
    run = graph(
        ("view", ATEN.view.default, "x", [24]),
        ("written", ATEN.neg_.default, "view"),
        ("copy", ATEN.clone.default, "x"),
        ("again", ATEN.clone.default, "x"),
    )
    storage = {n: compat.storage_id(v) for n, v in run.values.items() if n != "output"}
    assert storage["x"] == storage["view"] == storage["written"]
    assert len({storage["x"], storage["copy"], storage["again"]}) == 3


def counted(
    x_dtype: torch.dtype = torch.float32, hist_dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """`torch.histogram(x, out=...)`, of which torch has no meta kernel.

    The record is that of a trace in fp32, whatever the operands are now.
    """
    made = fx.Graph()
    given = {
        "x": torch.zeros(4, dtype=x_dtype),
        "hist": torch.zeros(2, dtype=hist_dtype),
        "bin_edges": torch.zeros(3),
    }
    x, hist, edges = map(made.placeholder, given)
    for node, value in zip((x, hist, edges), given.values(), strict=True):
        node.meta["val"] = value
    op, out = ATEN.histogram.bin_ct_out, {"hist": hist, "bin_edges": edges}
    call = made.create_node("call_function", op, (x, 2), out, "counted")
    call.meta["val"] = torch.zeros(2), torch.zeros(3)
    made.output(call)
    return fx.GraphModule({}, made)


def test_what_is_written_is_returned_without_a_meta_kernel() -> None:
    """Before the rewrite and after it: writes to it are seen."""
    memo: Memo = {}
    before = StandIns(counted(), memo)
    after = StandIns(counted(), memo, original=before)
    alone = StandIns(counted(), {}, original=before)  # asks for itself
    for run in (before, after, alone):
        hist, edges = run.values["counted"]
        assert hist is run.values["hist"]
        assert edges is run.values["bin_edges"]
    assert not before.has_no_answer("counted")


@pytest.mark.parametrize("operand", ["x_dtype", "hist_dtype"])
def test_without_a_meta_kernel_the_devices_own_refuses_operands(operand: str) -> None:
    before = StandIns(counted(), {})
    with pytest.raises(VerificationError) as raised:
        StandIns(counted(**{operand: LOW}), {}, original=before)
    says(raised, "counted", op="aten.histogram")


def test_what_is_written_is_returned_where_its_size_depends_on_data() -> None:
    """No stand-in tells that size, so that it comes from the record."""
    made = fx.Graph()
    x, mask, out = map(made.placeholder, ("x", "mask", "out"))
    x.meta["val"], mask.meta["val"] = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
    out.meta["val"] = torch.zeros(2)
    call = made.call_function(ATEN.masked_select.out, (x, mask), {"out": out})
    call.meta["val"] = torch.zeros(2)
    made.output(call)
    gm = fx.GraphModule({}, made)
    before = StandIns(gm, {})
    assert before.has_no_answer(call.name)
    for run in (before, StandIns(gm, {}, original=before)):
        assert run.values[call.name] is run.values["out"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([{"dim": 0, "keepdim": True}], [{"dim": 1, "keepdim": True}]),
        ([0, True], [0, False]),
        ([0, True], [1, True]),
    ],
)
def test_other_arguments_give_other_results(
    first: list[Any], second: list[Any]
) -> None:
    run = graph(
        ("a", ATEN.amax.default, "x", *first), ("b", ATEN.amax.default, "x", *second)
    )
    assert run.values["a"].shape != run.values["b"].shape


def test_a_number_of_another_type_gives_another_result() -> None:
    """1, 1.0 and True are equal, and promote differently."""
    whole = torch.zeros(3, dtype=torch.int32)
    run = graph(
        ("a", ATEN.add.Tensor, "x", 1),
        ("b", ATEN.add.Tensor, "x", 1.0),
        ("c", ATEN.add.Tensor, "x", True),
        given=whole,
    )
    dtypes = [run.values[n].dtype for n in "abc"]
    assert dtypes == [torch.int32, torch.float32, torch.int32]


def test_devices_are_replaced_wherever_they_are_named() -> None:
    cpu = torch.device("cpu")
    run = graph(
        ("made", ATEN.zeros.default, [2], {"device": cpu}),
        ("plain", ATEN.ones.default, [2], {"dtype": LOW}),
        ("moved", ATEN.to.device, "x", cpu, LOW),
        ("sums", ATEN.add.Tensor, "made", "plain"),
    )
    assert {v.device for v in run.values["output"]} == {META}
    assert run.values["moved"].dtype is LOW


def test_recorded_sizes_of_an_attribute_win() -> None:
    """A parameter is recorded with the symbolic sizes of its run."""
    made = fx.Graph()
    table = made.get_attr("table")
    table.meta["val"] = torch.zeros(5)
    made.output(table)
    root = nn.Module()
    root.table = torch.zeros(3)
    run = StandIns(fx.GraphModule(root, made), {})
    assert run.values["table"].shape == (5,)


def test_a_checkpointed_region_is_run() -> None:
    """Op by op: what it makes on a device of its own meets stand-ins too."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.zeros(4, 6)
    zeros = made.call_function(ATEN.zeros.default, ([4, 6],))
    zeros.meta["val"] = torch.zeros(4, 6)
    low = made.call_function(ATEN.to.dtype, (x, LOW))
    low.meta["val"] = torch.zeros(4, 6, dtype=LOW)
    made.output(made.call_function(ATEN.mul.Tensor, (low, zeros)))
    body = fx.GraphModule({}, made)
    run = graph(("a", checkpointed, "body", "x"), body=body)
    assert run.values["a"].device == META
    assert run.values["a"].dtype == torch.promote_types(LOW, torch.float32)


def recorded(target: Any, *args: Any, value: Any) -> Any:
    """The stand-in for a call whose recorded value is `value`."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.zeros(4, 6)
    call = made.call_function(target, (x, *args))
    call.meta["val"] = value
    made.output(call)
    return StandIns(fx.GraphModule({}, made), {}).values[call.name]


def test_what_depends_on_the_data_is_taken_as_recorded() -> None:
    found = recorded(ATEN.nonzero.default, value=torch.zeros(7, 2, dtype=torch.long))
    assert (found.shape, found.dtype, found.device) == ((7, 2), torch.long, META)
    assert recorded(ATEN._local_scalar_dense.default, value=1.5) == 1.5


def test_what_torch_does_not_look_into_is_taken_as_recorded() -> None:
    function = torch.ops.higher_order.cond
    first, second = recorded(
        function, value=(torch.zeros(2), torch.zeros(3, dtype=LOW))
    )
    assert (first.shape, second.dtype, second.device) == ((2,), LOW, META)


def test_symbolic_sizes_have_the_value_of_the_capture() -> None:
    mode = torch._subclasses.FakeTensorMode(
        shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()
    )
    fake = mode.from_tensor(torch.zeros(5, 6).t(), static_shapes=False)
    assert isinstance(fake.shape[1], torch.SymInt)
    run = graph(given=fake)
    assert (run.values["x"].shape, run.values["x"].stride()) == ((6, 5), (1, 6))
    assert graph(given=fake.shape[1]).values["x"] == 5
    assert graph(given=[fake.shape[1], 2.5]).values["x"] == [5, 2.5]


def test_a_sparse_tensor_stands_as_a_dense_one() -> None:
    value = torch.zeros(3, 4, dtype=LOW).to_sparse()
    found = graph(given=value).values["x"]
    assert (found.layout, found.shape, found.dtype) == (torch.strided, (3, 4), LOW)
    assert found.device == META


def product(*shape: int) -> fx.GraphModule:
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.zeros(shape)
    call = made.call_function(ATEN.mm.default, (x, x))
    call.meta["stack_trace"] = 'File "net.py", line 3, in forward\n    x @ x\n'
    made.output(call)
    return fx.GraphModule({}, made)


def test_an_op_that_fails_is_named_with_its_line() -> None:
    original, rewritten = product(4, 4), product(4, 6)
    with pytest.raises(VerificationError) as caught:
        StandIns(rewritten, {}, original=StandIns(original, {}))
    assert caught.value.nodes == ("mm_default", "x")
    says(caught, "RuntimeError", op="mm_default (aten.mm", line="net.py:3: x @ x")
    assert isinstance(caught.value.__cause__, RuntimeError)
