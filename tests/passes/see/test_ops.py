"""What is read off an op's name, schema and tags agrees with what the op does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from autoamp.passes import ops

aten = torch.ops.aten


# -- names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelt", "key"),
    [
        ("linear", "aten::linear"),
        (" linear ", "aten::linear"),
        ("aten.linear", "aten::linear"),
        ("aten::linear", "aten::linear"),
        ("torch.ops.aten.linear", "aten::linear"),
        ("linear.default", "aten::linear.default"),
        ("aten.linear.default", "aten::linear.default"),
        ("aten::linear.default", "aten::linear.default"),
        ("sum.dim_IntList", "aten::sum.dim_IntList"),
        ("torch.ops.aten.sum.dim_IntList", "aten::sum.dim_IntList"),
        ("prims.add", "prims::add"),
        ("mylib::op", "mylib::op"),
        ("mylib.op.default", "mylib::op.default"),
        ("aten.nothing", "aten::nothing"),
        ("sum.nothing", "aten::sum.nothing"),
    ],
)
def test_every_spelling_has_one_key(spelt: str, key: str) -> None:
    assert ops.parse_op_name(spelt) == key
    assert ops.parse_op_name(key) == key


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("aten::linear", True),
        ("aten::linear.default", True),
        ("aten::linear.other", False),
        ("aten::lineal", False),
        ("nowhere::linear", False),
        ("aten::", False),
        ("::", False),
        ("", False),
        ("aten::a b", False),
        ("aten::__doc__", False),
        ("aten::name", False),
    ],
)
def test_existence(key: str, there: bool) -> None:
    assert ops.exists(key) is there


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("aten::layernorm", "aten::layer_norm"),
        ("aten::sofmtax", "aten::softmax"),
        ("aten::sum.dim_Int", "aten::sum.dim_IntList"),
        ("nowhere::linear", "aten::linear"),
        ("aten::sofmtax.int", "aten::softmax"),
    ],
)
def test_close_names_exist_and_hold_what_was_meant(key: str, close: str) -> None:
    found = ops.close_names(key)
    assert close in found
    assert all(ops.exists(name) for name in found)
    assert len(found) <= 3


# -- writing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "written", "inplace"),
    [
        (aten.add.Tensor, (), False),
        (aten.add_.Tensor, ("self",), True),
        (aten.copy_.default, ("self",), True),
        (aten.add.out, ("out",), False),
        (aten.view.default, (), False),
        (aten.transpose_.default, ("self",), True),
        (aten._foreach_add_.Scalar, ("self",), False),
        (aten._native_batch_norm_legit.default, ("running_mean", "running_var"), False),
        (aten.batch_norm.default, ("running_mean", "running_var"), False),
    ],
)
def test_what_is_written(
    target: OpOverload, written: tuple[str, ...], inplace: bool
) -> None:
    assert ops.mutated_arguments(target) == written
    assert ops.mutates(target) is bool(written)
    assert ops.is_inplace(target) is inplace


def norm_statistics(target: OpOverload) -> dict[str, torch.Tensor]:
    """Runs a norm in training on random data; the statistics it was given."""
    stats = {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    values = {
        "input": torch.randn(5, 3, 4) + 7,
        "weight": torch.ones(3),
        "bias": torch.zeros(3),
        "training": True,
        "use_input_stats": True,
        "momentum": 0.5,
        "eps": 1e-5,
        "cudnn_enabled": False,
        **stats,
    }
    target(**{a.name: values[a.name] for a in target._schema.arguments})
    return stats


@pytest.mark.parametrize(
    "base",
    ["batch_norm", "instance_norm", "native_batch_norm", "_batch_norm_impl_index"],
)
def test_hidden_writes_happen_and_are_not_in_the_schema(base: str) -> None:
    target = getattr(aten, base).default
    declared = [a.name for a in target._schema.arguments if a.alias_info]
    stats = norm_statistics(target)
    assert not set(declared) & set(stats)
    assert ops.mutated_arguments(target) == tuple(stats)
    assert not torch.equal(stats["running_mean"], torch.zeros(3))


def test_every_op_given_running_statistics_is_known_to_write_them_or_not() -> None:
    does_not_write = {  # functional forms, and forms for evaluation
        "_batch_norm_no_update",
        "_batch_norm_with_update_functional",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
    }
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        base = name.partition(".")[0]
        if base.startswith("aten::") and not base.endswith("_backward"):
            for target in ops.overloads(base):
                arguments = {a.name: a for a in target._schema.arguments}
                stats = arguments.get("running_mean")
                if stats is not None and stats.alias_info is None:
                    found.add(base)
    assert found - {f"aten::{n}" for n in does_not_write} == set(ops.HIDDEN_WRITES)


# -- aliasing --------------------------------------------------------------------------

VIEWS: dict[str, tuple[OpOverload, Callable[[torch.Tensor], object]]] = {
    "view": (aten.view.default, lambda x: aten.view.default(x, [-1])),
    "chunk": (aten.chunk.default, lambda x: aten.chunk.default(x, 2)),
    "unbind": (aten.unbind.int, aten.unbind.int),
    "split": (aten.split.Tensor, lambda x: aten.split.Tensor(x, 2)),
    "reshape": (aten.reshape.default, lambda x: aten.reshape.default(x, [-1])),
    "contiguous": (aten.contiguous.default, aten.contiguous.default),
    "flatten": (aten.flatten.using_ints, aten.flatten.using_ints),
    "to": (aten.to.dtype, lambda x: aten.to.dtype(x, torch.float32)),
    "expand_as": (aten.expand_as.default, lambda x: aten.expand_as.default(x, x)),
    "type_as": (aten.type_as.default, lambda x: aten.type_as.default(x, x)),
    "dropout": (aten.dropout.default, lambda x: aten.dropout.default(x, 0.5, False)),
    "einsum": (aten.einsum.default, lambda x: aten.einsum.default("ij->ji", [x])),
    "meshgrid": (aten.meshgrid.default, lambda x: aten.meshgrid.default([x[0], x[1]])),
    "atleast_1d": (aten.atleast_1d.default, aten.atleast_1d.default),
    "broadcast_tensors": (
        aten.broadcast_tensors.default,
        lambda x: aten.broadcast_tensors.default([x, x]),
    ),
    "conj_physical": (aten.conj_physical.default, aten.conj_physical.default),
    "sum_to_size": (
        aten.sum_to_size.default,
        lambda x: aten.sum_to_size.default(x, [4, 4]),
    ),
    "cartesian_prod": (
        aten.cartesian_prod.default,
        lambda x: aten.cartesian_prod.default([x[0]]),
    ),
    "_unsafe_view": (
        aten._unsafe_view.default,
        lambda x: aten._unsafe_view.default(x, [16]),
    ),
    "relu_": (aten.relu_.default, aten.relu_.default),
}


def shares(value: object, x: torch.Tensor) -> bool:
    """Whether a tensor in `value` is in the storage of `x`."""
    tensors = value if isinstance(value, (list, tuple)) else [value]
    address = x.untyped_storage().data_ptr()
    return any(t.untyped_storage().data_ptr() == address for t in tensors)


@pytest.mark.parametrize("name", VIEWS)
def test_ops_that_may_return_their_input_say_so(name: str) -> None:
    target, call = VIEWS[name]
    x = torch.randn(4, 4)
    assert shares(call(x), x)
    assert ops.aliasing_arguments(target) != ()
    assert ops.is_view(target) is not ops.mutates(target)


@pytest.mark.parametrize(
    ("target", "call"),
    [
        (aten.add.Tensor, lambda x: x + x),
        (aten.clone.default, torch.clone),
        (aten.cat.default, lambda x: torch.cat([x])),
        (aten.index_select.default, lambda x: x.index_select(0, torch.arange(4))),
        (aten.linear.default, lambda x: F.linear(x, x)),
        (aten.softmax.int, lambda x: x.softmax(0)),
    ],
)
def test_ops_that_make_new_tensors_alias_nothing(
    target: OpOverload, call: Callable[[torch.Tensor], object]
) -> None:
    x = torch.randn(4, 4)
    assert not shares(call(x), x)
    assert ops.aliasing_arguments(target) == ()
    assert not ops.is_view(target)


# -- tags ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "random"),
    [
        (aten.dropout.default, True),
        (aten.dropout_.default, True),
        (aten.native_dropout.default, True),
        (aten.bernoulli.default, True),
        (aten.rand_like.default, True),
        (aten.scaled_dot_product_attention.default, True),
        (aten._native_multi_head_attention.default, False),
        (aten.lstm.input, True),
        (aten.linear.default, False),
        (aten.batch_norm.default, False),
    ],
)
def test_what_draws_random_numbers(target: OpOverload, random: bool) -> None:
    assert ops.is_random(target) is random
