"""The op rules: the files are true to torch, and the loader says what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import pickle
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from autoamp import compat
from autoamp.errors import RulesError
from autoamp.passes import ops
from autoamp.passes.decide.devices import named_device
from autoamp.passes.rules import Category, Condition, Rule, Rules, model, parse
from autoamp.passes.run import rewrite_graph
from autoamp.training.options import Options
from tests.says import says
from tests.small_models import Of
from tests.strategies import capture

aten = torch.ops.aten
BUILTIN, read = model.BUILTIN, parse.read
PRECISIONS = ("fp16", "bf16")
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def raw(name: str) -> dict[str, dict[str, object]]:
    """The TOML tables of a built-in file, as written."""
    return tomllib.loads(model.builtin_path(name).read_text(encoding="utf-8"))


def write(folder: Path, text: str | bytes) -> Path:
    """A rules file with this text."""
    path = folder / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# -- the files -------------------------------------------------------------------------

OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Than the one that the files are written for."""

NEW_OPS = {"_upsample_lanczos2d_aa"}
"""What that one has and torch 2.11 has not."""


@pytest.mark.parametrize("name", BUILTIN)
def test_every_named_op_is_in_this_torch(name: str) -> None:
    tables = raw(name)
    names = [key for c in Category for key in tables.get(c, {})]
    missing = {n for n in names if not ops.exists(ops.parse_op_name(n))}
    assert missing <= (NEW_OPS if OLDER_TORCH else set())
    # None twice, and none dropped but for those.
    assert len(names) - len(missing) == len(Rules.load(name).table)


@pytest.mark.skipif(OLDER_TORCH, reason="the files name ops that this torch lacks")
@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_files_pass_the_checks_made_on_a_users_file(name: str) -> None:
    assert read(model.builtin_path(name), builtin=False).rules == Rules.load(name).table


@pytest.mark.parametrize("name", PRECISIONS)
def test_reasons_say_something_of_their_own(name: str) -> None:
    rules = Rules.load(name).table.values()
    reasons = Counter(rule.reason for rule in rules)
    assert [r for r, count in reasons.items() if count > 4] == []
    assert [
        rule.op for rule in rules if len(rule.reason) < 8 or "@" in rule.reason
    ] == []
    conditions = [c for rule in rules for c in rule.when]
    assert [c for c in conditions if len(c.reason) < 20 or "@" in c.reason] == []


@pytest.mark.parametrize("name", PRECISIONS)
def test_pure_views_are_clear(name: str) -> None:
    rules = Rules.default(name)
    denied = {"imag", "view_as_complex", "view_as_real"}  # their dtype is complex64
    wrong = []
    for op in rules.table:
        for target in ops.overloads(op):
            declared = [
                r.alias_info is not None and not r.alias_info.is_write
                for r in target._schema.returns
            ]
            copied = torch.Tag.view_copy in target.tags
            rule = rules.lookup(target)
            if rule and (any(declared) or copied) and op.split("::")[1] not in denied:
                wrong += [] if rule.category is Category.CLEAR else [op]
    assert wrong == []


LISTED = {
    "allow": "linear matmul bmm addmm conv2d lstm einsum scaled_dot_product_attention",
    "clear": "eq ne lt le gt ge isnan isfinite argmax",
    "deny": "normal rand randn rand_like randn_like bernoulli uniform multinomial "
    "poisson exponential",
}
"""Products; ops with no float among their results; draws of random numbers."""


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("category", LISTED)
def test_ops_are_in_their_list(name: str, category: str) -> None:
    table = Rules.default(name).table
    found = {op: table[f"aten::{op}"].category for op in LISTED[category].split()}
    assert found == dict.fromkeys(found, category)


def test_the_files_of_both_precisions_agree() -> None:
    fp16, bf16 = (Rules.default(p).table for p in PRECISIONS)
    assert {*fp16} == {*bf16}
    assert len(fp16) >= 700
    for table in (fp16, bf16):
        clamp = table["aten::clamp"]
        assert (clamp.restores, clamp.restores_given) == (False, ("min", "max"))
        for op in ("exp", "relu", "softplus", "gelu", "log_softmax", "mul"):
            unbounded = table[f"aten::{op}"]
            assert not unbounded.restores
            assert not unbounded.restores_given
        listed = {f"aten::{op}" for op in ("to", "type_as", "_to_copy")} & {*table}
        assert not listed, "the user's casts"
    # Range is a danger in fp16, and not in bf16.
    exp = (fp16["aten::exp"].category, bf16["aten::exp"].category)
    assert exp == ("deny", "infer")


@pytest.mark.parametrize(
    ("equation", "category"),
    [
        ("ij,jk->ik", "allow"),
        ("bld,de", "allow"),
        ("ij,ij", "allow"),
        ("...i,...i->...", "allow"),
        ("ij,ij->ij", "infer"),
        ("i,j->ij", "infer"),
        ("ij->i", "infer"),
        ("ij -> ji", "infer"),
        ("ij,k->i", "infer"),
    ],
)
def test_an_einsum_is_a_product_where_it_contracts(
    equation: str, category: str
) -> None:
    left = equation.partition("->")[0]
    sizes = [[2] * len(each.strip(". ")) for each in left.split(",")]
    gm = capture(Of(lambda m, *given: torch.einsum(equation, *given)), len(sizes))
    given, low = [torch.ones(size) for size in sizes], torch.bfloat16
    # On a CPU an einsum that is no product is recorded by its parts.
    gpu = named_device("h100", low)
    found = rewrite_graph(gm, given, Options(do_no_harm=False), low, device=gpu)
    assert found.classified.verdicts["einsum"].category == category


# -- the facts in them, measured -------------------------------------------------------

SPAN = torch.linspace(-60_000, 60_000, 2001)
BOUNDED = "sigmoid tanh erf sin cos atan sign sinc"
RESTORING: dict[str, Callable[..., Any]] = {
    op: getattr(torch, op) for op in BOUNDED.split()
} | {
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "softmax": lambda x: F.softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "rms_norm": lambda x: F.rms_norm(x, x.shape),
    "group_norm": lambda x: F.group_norm(x[None, None], 1),
    "cosine_similarity": lambda x: F.cosine_similarity(x[None], x[None]),
}


@pytest.mark.parametrize("op", RESTORING)
def test_restoring_ops_bound_what_is_out_of_range(op: str) -> None:
    for name in PRECISIONS:
        assert Rules.default(name).table[f"aten::{op}"].restores
    assert RESTORING[op](SPAN * 1e6).abs().max() < 100


TERMS = 20_000
ACCUMULATE = {
    "sum": (lambda x: x.sum(), 5000),
    "mean": (lambda x: x.mean(), 0.25),
    "linalg_vector_norm": (torch.linalg.vector_norm, 35.36),
    "avg_pool1d": (lambda x: F.avg_pool1d(x[None], TERMS), 0.25),
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x.view(1, 100, 200), 1),
        0.25,
    ),
    "softmax": (lambda x: F.softmax(x, 0).float().sum(), 1),
}
STAND_STILL = {
    "index_add": lambda x: x[:1].mul(0).index_add(0, torch.zeros(TERMS).long(), x),
    "segment_reduce": lambda x: torch.segment_reduce(
        x, "sum", lengths=torch.tensor([TERMS])
    ),
}


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("op", ACCUMULATE)
def test_ops_said_to_accumulate_in_fp32_do(name: str, op: str) -> None:
    assert Rules.default(name).table[f"aten::{op}"].category is not Category.DENY
    function, expected = ACCUMULATE[op]
    got = function(torch.full((TERMS,), 0.25, dtype=LOW[name])).item()
    assert got == pytest.approx(expected, rel=torch.finfo(LOW[name]).eps)


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("op", STAND_STILL)
def test_ops_denied_for_standing_still_do_so(name: str, op: str) -> None:
    assert Rules.default(name).table[f"aten::{op}"].category is Category.DENY
    got = STAND_STILL[op](torch.full((TERMS,), 0.25, dtype=LOW[name])).item()
    assert got < 0.2 * 5000


@pytest.mark.parametrize("name", PRECISIONS)
def test_adaptive_avg_pool3d_is_denied_where_its_kernel_sums_low(name: str) -> None:
    (condition,) = Rules.default(name).table["aten::adaptive_avg_pool3d"].when
    assert (condition.test, condition.value) == ("device_is", "cpu")
    x = torch.full((1, 1, 20, 20, 50), 0.25, dtype=LOW[name])
    assert F.adaptive_avg_pool3d(x, 2)[0, 0, 0, 0, 0].item() != 0.25


@pytest.mark.parametrize("name", PRECISIONS)
def test_batch_norm_takes_low_data_with_fp32_parameters_on_this_cpu(name: str) -> None:
    rule = Rules.default(name).table["aten::batch_norm"]
    kept = {n: torch.ones(3) for n in rule.fp32_operands}
    assert set(kept) == {"weight", "bias", "running_mean", "running_var"}
    x = torch.randn(4, 3, dtype=LOW[name], requires_grad=True)
    out = F.batch_norm(x, training=True, **kept)
    out.sum().backward()
    assert (out.dtype, x.grad.dtype) == (LOW[name], LOW[name])


NO_CPU_KERNEL = {
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(1, 4, 4, 4), 2),
    "cdist": lambda x: torch.cdist(x.view(8, 8), x.view(8, 8)),
    "fft_rfft": lambda x: torch.fft.rfft(x[:9]),
    "linalg_inv": lambda x: torch.linalg.inv(x.view(8, 8)),
    "linalg_svd": lambda x: torch.linalg.svd(x.view(8, 8)),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "_upsample_bilinear2d_aa": lambda x: F.interpolate(
        x.view(1, 1, 8, 8), size=(4, 4), mode="bilinear", antialias=True
    ),
}


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("op", NO_CPU_KERNEL)
def test_ops_said_to_lack_a_cpu_kernel_do(name: str, op: str) -> None:
    assert "cpu" in Rules.default(name).table[f"aten::{op}"].no_kernel
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        NO_CPU_KERNEL[op](torch.rand(64, dtype=LOW[name]))


# -- the compatibility sets ------------------------------------------------------------


KEYS = {"torch-cuda": "AutocastCUDA", "torch-cpu": "AutocastCPU"}


@functools.cache
def registered() -> dict[str, set[str]]:
    """The ops that this torch treats under each dispatch key."""
    # In a process of its own: what other tests trace may leave registrations behind.
    code = f"""
import torch
has = torch._C._dispatch_has_kernel_for_dispatch_key
for op in torch._C._dispatch_get_all_op_names():
    print(*[key for key in {[*KEYS.values()]} if has(op, key)], op, sep=" ")
"""
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, set[str]] = {key: set() for key in KEYS.values()}
    for line in asked.stdout.splitlines():
        *keys, op = line.split()
        for key in keys:
            found[key].add(op if "." in op else op + ".default")
    return found


def calls_another(name: str, op: str) -> bool:
    """Whether torch calls other ops for an op, of which autocast knows nothing."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    op = op.removesuffix(".default")
    return has(op, "CompositeImplicitAutograd") and not has(op, KEYS[name])


def changes(name: str, found: set[str]) -> dict[str, set[str]]:
    """What torch, which treats `found`, has added and dropped since the file `name`."""
    listed = {op for op in Rules.load(name).table if not calls_another(name, op)}
    if torch.version.cuda is None:  # registered with cuDNN, which a CPU build lacks
        listed.discard("aten::_cudnn_rnn.default")
    if OLDER_TORCH:  # it has named tensors, and no rule for this norm
        found = {
            op for op in found if "dimname" not in op.lower() and "names" not in op
        }
        listed -= {"aten::rms_norm.default"} - found
    return {"torch has added": found - listed, "torch has dropped": listed - found}


@pytest.mark.parametrize("name", KEYS)
def test_compatibility_sets_are_what_the_dispatcher_has(name: str) -> None:
    found = registered()[KEYS[name]]
    assert changes(name, found) == {
        "torch has added": set(),
        "torch has dropped": set(),
    }
    planted = changes(name, found ^ {"aten::linear.default", "aten::sin.default"})
    assert planted == {
        "torch has added": {"aten::sin.default"},
        "torch has dropped": {"aten::linear.default"},
    }


# What each op needs beside one tensor, four elements long in each dimension.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_upsample_bicubic2d_aa.vec": ([8, 8], False, None),
    "_upsample_bilinear2d_aa.vec": ([8, 8], False, None),
    "_upsample_nearest_exact1d.vec": ([8], None),
    "_upsample_nearest_exact2d.vec": ([8, 8], None),
    "_upsample_nearest_exact3d.vec": ([8, 8, 8], None),
    "cross_entropy_loss.default": ("labels",),
    "cumulative_trapezoid.x": ("x",),
    "linalg_norm.ord_str": ("fro",),
    "nll_loss_nd.default": ("labels",),
    "pad.default": ([1, 1], "reflect"),
    "pairwise_distance.default": ("x",),
    "special_log_softmax.default": (-1,),
    "special_logsumexp.default": ([-1],),
    "special_softmax.default": (-1,),
    "sum_to_size.default": ([1, 4, 4],),
    "trapezoid.x": ("x",),
    "trapz.x": ("x",),
    "upsample_bicubic2d.vec": ([8, 8], False, None),
    "upsample_bilinear2d.vec": ([8, 8], False, None),
    "upsample_linear1d.vec": ([8], False, None),
    "upsample_nearest1d.vec": ([8], None),
    "upsample_nearest2d.vec": ([8, 8], None),
    "upsample_nearest3d.vec": ([8, 8, 8], None),
    "upsample_trilinear3d.vec": ([8, 8, 8], False, None),
}


def result_under_autocast(name: str, op: str) -> torch.dtype:
    """The dtype of what an op gives for a low tensor, under a device's autocast."""
    device = name.removeprefix("torch-")
    base, overload = op.removeprefix("aten::").split(".")
    target = getattr(getattr(torch.ops.aten, base), overload)
    axes = {"1d": 3, "2d": 4, "3d": 5, "ord_str": 2, "loss": 2}
    dim = next((n for text, n in axes.items() if text in op), 3)
    with FakeTensorMode():
        x = torch.empty([4] * dim, device=device, dtype=torch.bfloat16)
        labels = torch.empty(4, device=device, dtype=torch.long)
        named = {"x": x, "labels": labels}
        given = [
            named.get(each, each) if isinstance(each, str) else each
            for each in ARGUMENTS.get(op, ())
        ]
        region = compat.AutocastState(device, x.dtype, enabled=True)
        with compat.in_autocast(region):
            return target(x, *given).dtype


COMPOSITES = [
    (name, op)
    for name in KEYS
    for op in sorted(Rules.load(name).table)
    if calls_another(name, op) and op != "aten::inner.default"
]


@pytest.mark.parametrize(("name", "op"), COMPOSITES)
def test_ops_that_call_a_listed_op_give_fp32(name: str, op: str) -> None:
    """They have no entry of their own in autocast."""
    assert result_under_autocast(name, op.removeprefix("aten::")) is torch.float32


def test_inner_takes_the_widest_dtype_on_cuda_alone() -> None:
    with FakeTensorMode():
        x = torch.ones(4, 4, device="cuda", dtype=torch.bfloat16)
        region = compat.AutocastState("cuda", x.dtype, enabled=True)
        with compat.in_autocast(region):
            assert torch.inner(x, x.float()).dtype is torch.float32
            assert torch.inner(x, x).dtype is torch.bfloat16


# -- looking up ------------------------------------------------------------------------


def table_of(**rules: str) -> Rules:
    """A table from `name=category`, where `__` stands for the dot of an overload."""
    keys = {f"aten::{n.replace('__', '.')}": c for n, c in rules.items()}
    return Rules("t", {k: Rule(k, Category(c), "why", "here") for k, c in keys.items()})


def test_the_exact_overload_goes_before_the_name() -> None:
    rules = table_of(sum="allow", sum__dim_IntList="deny")
    assert rules.lookup(aten.sum.dim_IntList).category is Category.DENY
    assert rules.lookup(aten.sum.default).category is Category.ALLOW
    assert rules.lookup(aten.mul.Tensor) is None
    assert rules.lookup(aten.sum.IntList_out) is None


def test_an_inplace_op_has_the_rule_of_its_plain_form_unless_it_has_its_own() -> None:
    assert table_of(relu="clear").lookup(aten.relu_.default).category == "clear"
    own = table_of(relu="clear", relu_="deny")
    assert own.lookup(aten.relu_.default).category is Category.DENY
    assert own.lookup(aten.relu.default).category is Category.CLEAR
    listed = Rules.default("fp16").with_lists(allow=["rrelu_"])
    rule = listed.lookup(aten.rrelu_.default)
    assert (rule.category, rule.no_kernel) == (Category.ALLOW, ("cpu",))


def test_defaults_by_name_and_by_dtype_are_one_object() -> None:
    assert Rules.default("bf16") is Rules.default(torch.bfloat16)
    assert Rules.default("fp16") is Rules.default("half")
    assert Rules.default("bf16").dtype == "bfloat16"
    with pytest.raises(RulesError):
        Rules.default("fp8")


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_rules_survive_copies(copied) -> None:
    rules = Rules.default("fp16")
    rules.lookup(aten.exp.default)
    again = copied(rules)
    assert (again, hash(again)) == (rules, hash(rules))
    assert again.lookup(aten.exp.default) == rules.lookup(aten.exp.default)


# -- laying over -----------------------------------------------------------------------


def test_a_users_op_moves_and_keeps_the_facts_but_not_the_conditions() -> None:
    before = Rules.default("fp16")
    after = before.with_lists(infer=["batch_norm"], allow=["sum"], deny=["avg_pool3d"])
    assert "aten::sum" in before.names("infer")
    assert "aten::sum" in after.names("allow")
    assert "aten::sum" not in after.names("infer")
    assert before.table["aten::sum"].when
    assert after.table["aten::sum"].when == ()
    assert "running_var" in after.table["aten::batch_norm"].fp32_operands
    assert after.table["aten::avg_pool3d"].no_kernel == ("cpu",)
    assert after.table["aten::sum"].origin == "allow="
    assert "allow=sum" in after.table["aten::sum"].reason


def test_a_name_replaces_the_rules_of_its_overloads() -> None:
    rules = table_of(sum__dim_IntList="deny", sum__default="deny", mul="infer")
    after = rules.with_lists(allow=["sum"])
    assert after.lookup(aten.sum.dim_IntList).category is Category.ALLOW
    assert set(after.table) == {"aten::sum", "aten::mul"}
    both = table_of().with_lists(deny=["sum.dim_IntList"], allow=["sum", "aten.sum"])
    assert both.lookup(aten.sum.dim_IntList).category is Category.DENY
    assert both.lookup(aten.sum.default).category is Category.ALLOW


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"deny": ["exp"], "allow": ["aten::exp"]}, ["allow=", "deny=", "aten::exp"]),
        ({"deny": ["layernorm"]}, ["deny=layernorm", "aten::layer_norm"]),
        ({"infer": ["sum.dim_Int"]}, ["infer=sum.dim_Int", "aten::sum.dim_IntList"]),
        ({"clear": "exp"}, ['clear="exp"', "list of op names"]),
        ({"allow": [torch.exp]}, ["allow=", "not the name of an op"]),
        ({"allow": [""]}, ["allow="]),
    ],
)
def test_a_wrong_list_is_named_with_what_to_do(lists, words) -> None:
    with pytest.raises(RulesError) as raised:
        Rules.default("fp16").with_lists(**lists)
    says(raised, *words)


def test_merged_rules_win_in_order(tmp_path) -> None:
    one, two = table_of(exp="allow", mul="deny"), table_of(exp="clear")
    merged = Rules.default("bf16").merge(one, two)
    assert merged.table["aten::exp"].category is Category.CLEAR
    assert merged.table["aten::mul"].category is Category.DENY
    assert merged.table["aten::add"] == Rules.default("bf16").table["aten::add"]
    assert (merged.name, merged.dtype) == ("bf16 + t + t", "bfloat16")


def test_a_merged_rule_says_what_it_says_and_keeps_the_rest(tmp_path) -> None:
    rules = '[deny]\ntanh={reason="r", restores=false}\navg_pool3d="r"\n'
    mine = write(tmp_path, rules)
    merged = Rules.default("fp16").merge(Rules.load(mine))
    assert not merged.table["aten::tanh"].restores
    assert merged.table["aten::avg_pool3d"].no_kernel == ("cpu",)


def test_rules_for_the_other_dtype_are_refused() -> None:
    with pytest.raises(RulesError) as raised:
        Rules.default("fp16").merge(Rules.default("bf16"))
    says(raised, "bfloat16", "float16")


# -- reading files ---------------------------------------------------------------------


def test_a_file_is_read_in_full(tmp_path) -> None:
    path = write(
        tmp_path,
        """
        [meta]
        dtype = "float16"
        description = "mine"
        [infer]
        clamp = { reason = "r", restores_given = ["min", "max"],
          jumps = true, restores = true,
          no_kernel = ["cpu"], fp32_operands = ["self"], when = [
            { test = "argument_is", argument = "min", value = 0, category = "deny",
              reason = "a" },
            { test = "exponent_outside", value = [-1, 2.5], category = "allow",
              reason = "b" },
          ] }
        """.replace(",\n          ", ", "),
    )
    rules = Rules.load(path)
    assert (rules.name, rules.dtype) == ("mine.toml", "float16")
    assert rules.table["aten::clamp"] == Rule(
        op="aten::clamp",
        category=Category.INFER,
        reason="r",
        origin=str(path),
        fp32_operands=("self",),
        restores=True,
        restores_given=("min", "max"),
        jumps=True,
        no_kernel=("cpu",),
        when=(
            Condition("argument_is", 0, Category.DENY, "a", "min"),
            Condition("exponent_outside", (-1.0, 2.5), Category.ALLOW, "b"),
        ),
        stated=frozenset({*model.FACTS, "when"}),
    )


WHEN = '[infer]\nsum={reason="r", when=[{%s}]}'
WRONG: dict[str, tuple[str | bytes, list[str]]] = {
    "not text": (b"\xff\xfe[allow]", ["not a TOML file"]),
    "not TOML": ("[allow", ["not a TOML file"]),
    "deep": ("[allow]\nexp=" + "[" * 100_000, ["not a TOML file"]),
    "unknown table": ('[alow]\nexp="r"', ["alow", "no such table", "allow"]),
    "stray key": ('allow="exp"', ["allow", "must be a table"]),
    "unknown op": ('[deny]\nlayernorm="r"', ["deny.layernorm", "aten::layer_norm"]),
    "unknown overload": (
        '[deny]\n"sum.dim_Int"="r"',
        ["deny.sum.dim_Int", "aten::sum.dim_IntList"],
    ),
    "unquoted dot": ('[deny]\nsum.dim_IntList="r"', ["deny.sum.dim_IntList", "quote"]),
    "two tables": (
        '[deny]\nexp="r"\n[allow]\nexp="r"',
        ["aten::exp", "[allow]", "[deny]"],
    ),
    "two spellings": ('[deny]\nexp="r"\n"aten::exp"="r"', ["aten::exp", "twice"]),
    "empty reason": ('[deny]\nexp=" "', ["deny.exp.reason", "not empty"]),
    "no reason": ("[deny]\nexp={restores=true}", ["deny.exp.reason"]),
    "wrong value": ("[deny]\nexp=3", ["deny.exp", "must be a reason"]),
    "unknown attribute": (
        '[deny]\nexp={reason="r", restore=true}',
        ["exp.restore", "restores"],
    ),
    "flag": ('[deny]\nexp={reason="r", restores=1}', ["exp.restores", "true or false"]),
    "keep": ('[keep]\nmodules = "head"', ["must be a list of module paths"]),
    "kept numbers": ("[keep]\nmodules = [1]", ["must be a list of module paths"]),
    "keep key": ('[keep]\nmodule = ["head"]', ["keep.module", "unknown; use modules"]),
    "long integer": ("[deny]\nmm = " + "9" * 5000, ["not a TOML file"]),
    "integer in meta": (
        "[meta]\ndtype = 0x" + "f" * 5000,
        ["meta.dtype", "20000 bits"],
    ),
    "integer of 64 bits": (
        WHEN % 'test="reduces_at_least", value=9223372036854775808',
        ["infer.sum", "64 bits"],
    ),
    "integer of 400 digits": (
        WHEN % f'test="exponent_outside", value=[1, {"9" * 400}]',
        ["infer.sum", "1329 bits"],
    ),
    "no UTF-8": (b"[deny]\nexp = 'f\xfcr'", ["not a TOML file", "UTF-8"]),
    "long key": ("a" + ".a" * 10**5 + " = 1", ["line 1 has more than 100 dots"]),
    "names": (
        '[deny]\nexp={reason="r", no_kernel="cpu"}',
        ["no_kernel", "list of names"],
    ),
    "argument": (
        '[deny]\nexp={reason="r", fp32_operands=["x"]}',
        ["exp.fp32_operands", "no argument 'x'", "self"],
    ),
    "meta key": ("[meta]\nversion=1", ["meta.version", "dtype"]),
    "meta dtype": ('[meta]\ndtype="fp16"', ["meta.dtype", "float16"]),
    "when": ('[infer]\nsum={reason="r", when="x"}', ["sum.when", "list of tables"]),
    "no test": (WHEN % 'category="deny", reason="r"', ["when[0].test", "device_is"]),
    "unknown test": (WHEN % 'test="size"', ["when[0].test", "reduces_at_least"]),
    "condition key": (WHEN % "tests=1", ["when[0].tests", "test"]),
    "condition category": (
        WHEN % 'test="device_is", value="cpu", category="no", reason="r"',
        ["when[0].category", "clear"],
    ),
    "condition reason": (
        WHEN % 'test="device_is", value="cpu", category="deny"',
        ["when[0].reason"],
    ),
}
CONDITIONS = {
    'test="reduces_at_least", value=true': ["value", "whole number"],
    'test="exponent_outside", value=[2, 1]': ["value", "[lowest, highest]"],
    'test="contracts", value=1': ["value", "true or false"],
    'test="device_is", value=1': ["value", "device type"],
    'test="argument_is", argument="no", value=1': ["argument", "self"],
    'test="argument_is", argument="dim", value=[1]': ["value"],
    'test="argument_is", argument="dim", value=nan': ["value", "is nan"],
    'test="device_is", argument="dim", value="cpu"': ["argument", "delete"],
}
for _condition, (_key, *_words) in CONDITIONS.items():
    _text = WHEN % f'{_condition}, category="deny", reason="r"'
    WRONG[_condition] = (_text, [f"when[0].{_key}", *_words])


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named_with_the_key_and_what_to_do(case: str, tmp_path) -> None:
    text, words = WRONG[case]
    path = write(tmp_path, text)
    with pytest.raises(RulesError) as raised:
        Rules.load(path)
    says(raised, path, *words)


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    paths = (tmp_path / "gone.toml", "fp61", tmp_path, 5, None, b"a.toml")
    for path in paths:
        with pytest.raises(RulesError) as raised:
            Rules.load(path)
        says(raised, path)


@pytest.mark.parametrize("path", ["a" * 5000 + ".toml", "a\0.toml"])
def test_a_path_that_no_file_has_is_an_error(path: str) -> None:
    with pytest.raises(RulesError) as raised:
        Rules.load(path)
    says(raised, "a")


@pytest.mark.parametrize("kind", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_file_as_editors_on_windows_write_it(tmp_path, kind: str, ends: str) -> None:
    mark = "\ufeff" if kind == "utf-16-be" else ""
    text = mark + ends.join(("[deny]", 'exp = "für"', 'exq = "r"'))
    path = write(tmp_path, text.encode(kind))
    faults, rules = parse.check(path)
    assert ([fault.line for fault in faults], rules) == ([3], 1)
    path = write(tmp_path, text.rpartition(ends)[0].encode(kind))
    assert Rules.load(path).table["aten::exp"].reason == "für"


def test_many_unknown_ops_are_each_compared_with_few_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 1,900 names that ops may have, those with the same pairs of letters."""
    compared: list[int] = []

    def counting(word: str, names: list[str], *rest: Any) -> list[str]:
        compared.append(len(names))
        return close(word, names, *rest)

    close = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", counting)
    lines = [f'sofmtax{number} = "r"' for number in range(500)]
    faults, _ = parse.check(write(tmp_path, "\n".join(("[deny]", *lines))))
    assert len(faults) == len(compared) == 500
    assert all("aten::softmax" in fault.problem for fault in faults)
    assert max(compared) <= 40


@pytest.mark.parametrize(("extra", "fits"), [(0, True), (1, False)])
def test_the_size_limit_is_where_it_says(tmp_path, extra: int, fits: bool) -> None:
    path = write(tmp_path, "#" * (parse.MAX_BYTES + extra))
    if fits:
        assert Rules.load(path).table == {}
    else:
        with pytest.raises(RulesError) as raised:
            Rules.load(path)
        says(raised, parse.MAX_BYTES)


def test_an_op_this_torch_lacks_is_left_out_of_a_builtin_file(tmp_path, caplog) -> None:
    path = write(tmp_path, '[deny]\nexp="r"\nnot_yet="r"\n')
    with caplog.at_level("DEBUG", logger="autoamp.passes.rules"):
        rules = read(path, builtin=True).rules
    assert list(rules) == ["aten::exp"]
    says(caplog.records, op="aten::not_yet")


def test_custom_ops_have_rules_too(tmp_path) -> None:
    @torch.library.custom_op("autoamp_rules_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    mine = Rules.load(write(tmp_path, '[allow]\n"autoamp_rules_test::twice"="r"'))
    target = torch.ops.autoamp_rules_test.twice.default
    assert mine.lookup(target).category is Category.ALLOW
    lists = table_of().with_lists(deny=["autoamp_rules_test.twice"])
    assert lists.lookup(target).category is Category.DENY


def test_the_packaged_copy_goes_before_the_checkout(tmp_path) -> None:
    packaged, checkout = tmp_path / "_rules", tmp_path / "rules"
    for folder in (packaged, checkout):
        folder.mkdir()
        for name in BUILTIN:
            (folder / f"{name}.toml").touch()
    assert model.directory((packaged, checkout)) == packaged
    (packaged / "fp16.toml").unlink()
    assert model.directory((packaged, checkout)) == checkout
    (checkout / "fp16.toml").unlink()
    with pytest.raises(RulesError) as raised:
        model.directory((packaged, checkout))
    says(raised, packaged, checkout, "reinstall")


def test_a_rules_file_can_keep_modules_in_fp32(tmp_path: Path) -> None:
    path = tmp_path / "keep.toml"
    path.write_text('[keep]\nmodules = ["head", "layers.*"]\n[deny]\nexp = "large"\n')
    rules = Rules.load(path)
    assert rules.keep == ("head", "layers.*")
    laid = Rules.default("bf16").merge(rules)
    assert laid.keep == rules.keep
    assert pickle.loads(pickle.dumps(laid)) == laid
    assert laid != Rules.default("bf16").merge(dataclasses.replace(rules, keep=()))
