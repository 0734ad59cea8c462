"""Another torch: private functions that are missing, and ops it does not have.

Every name of torch that autoamp/compat looks for is taken away once, and the fallback
does its work; those that tell of captures are in test_faults_capture.py.
"""

from __future__ import annotations

import copy
import importlib
import math
import pkgutil
import re
import runpy
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard

import autoamp
from autoamp import compat
from autoamp.compat import calls as told_of_calls
from autoamp.compat import (
    capture,
    device,
    encoder,
    gradients,
    inductor_casts,
    recurrent,
    tensors,
    tracing,
    transforms,
)
from autoamp.compat.distributed import ddp, fsdp, groups
from autoamp.compat.dynamo import frames, layers, on_meta, regions
from autoamp.compat.modes import process
from autoamp.kernels.attention_backward import function as cpu_attention
from tests.capture.test_changing import Appends, Counts, Scaled
from tests.conformance.table import Figures
from tests.model.test_methods import Counted
from tests.small_models import BF16 as OPTIONS
from tests.training.steps import BF16, FP16, assert_same, mlp, weights_of

COMPAT = Path(compat.__file__).parent
HERE = Path(__file__).parent
MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(compat.__path__, f"{compat.__name__}.")
]

LIMIT = 8  # torch._dynamo.config.recompile_limit

# -- taken away one by one -------------------------------------------------------------

ABSENT = (
    "_lazy_clone",
    "_data_address",
    "_storage_Use_Count",
    "_use_count",
    "_len_torch_dispatch_stack",
    "_get_current_dispatch_mode",
    "disable",
    "_current_level",
    "_functorch",
    "_autograd",
    "_top_saved_tensors_default_hooks",
    "_active_ddp_module",
    "_current_graph_task_id",
    "_ProxyTensor",
    "fast_detach",
    "real_recompile",
    "next_id",
    "_disable_current_modes",
)
"""What a model that trains meets."""


def hide(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Lets compat find `names` nowhere; torch itself still does, and needs them."""

    def getattr_(owner: Any, name: str, *default: Any) -> Any:
        return default[0] if name in names else getattr(owner, name, *default)

    def hasattr_(owner: Any, name: str) -> bool:
        return name not in names and hasattr(owner, name)

    torch._dynamo.reset()  # or a model alike would run what was captured before
    for module in MODULES:
        patch.setattr(module, "getattr", getattr_, raising=False)
        patch.setattr(module, "hasattr", hasattr_, raising=False)


def trained(options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Weights after a few steps, micro-batches and a write behind everybody's back."""
    torch.manual_seed(0)
    model = autoamp.convert(mlp(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 2:
            next(model.parameters()).data.mul_(0.5)
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert autoamp.report(model).skipped == []
    return weights_of(model), autoamp.report(model).runs


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Tensor], int]:
    return trained(BF16)


@pytest.mark.parametrize("name", ABSENT)
def test_training_is_the_same_without(
    name: str, expected: tuple[dict[str, Tensor], int], monkeypatch, figures: Figures
) -> None:
    hide(monkeypatch, name)
    assert_same(trained(BF16), expected)
    figures.count("names taken away")


def test_make_fx_of_an_older_torch(
    expected: tuple[dict[str, Tensor], int], monkeypatch, figures: Figures
) -> None:
    made = []

    def make_fx(
        run: Callable[..., Any],
        tracing_mode: str,
        pre_dispatch: bool,
        _allow_non_fake_inputs: bool,
        _error_on_data_dependent_ops: bool,
    ) -> Any:
        made.append(run)
        return whole(
            run,
            tracing_mode=tracing_mode,
            pre_dispatch=pre_dispatch,
            _allow_non_fake_inputs=_allow_non_fake_inputs,
            _error_on_data_dependent_ops=_error_on_data_dependent_ops,
        )

    whole = tracing.make_fx
    monkeypatch.setattr(tracing, "make_fx", make_fx)
    assert_same(trained(BF16), expected)
    assert made
    figures.count("names taken away")


# -- single functions ------------------------------------------------------------------


def no_backends(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "_TorchCompileInductorWrapper", "_TorchCompileWrapper")
    assert capture.resolved_backend("eager", None, None, None) is None
    assert capture.is_inductor("inductor")
    assert not capture.is_inductor(
        torch._TorchCompileInductorWrapper("default", {}, None)
    )


def no_layouts(patch: pytest.MonkeyPatch) -> None:
    """Then weights are laid as they are, and inductor permutes what it wants."""
    assert capture.inductor_permutes()
    hide(patch, "layout_optimization")
    assert not capture.inductor_permutes()


def no_exact_casts(patch: pytest.MonkeyPatch) -> None:
    """Then `exact_casts` is refused, and inductor is told nothing."""
    assert compat.can_round_at_casts()
    hide(patch, "emulate_precision_casts")
    with pytest.raises(autoamp.OptionError, match="whose inductor can round"):
        autoamp.convert(mlp(), backend="inductor", exact_casts=True)
    assert inductor_casts._patches(True, None, {}) == {}


def compiled_report() -> autoamp.Report:
    torch._dynamo.reset()
    model = autoamp.convert(mlp(), backend="inductor", **BF16)
    with torch.no_grad():
        y = model(torch.ones(4, 8))
    assert y.isfinite().all()
    return autoamp.report(model)


UNTOLD = "inductor does not tell which casts it keeps inside a kernel"


def is_untold(report: autoamp.Report) -> bool:
    return UNTOLD in " ".join(str(report).split())


def no_schedule(patch: pytest.MonkeyPatch) -> None:
    assert not is_untold(compiled_report())
    hide(patch, "_post_fusion_custom_pass")
    assert is_untold(compiled_report())


def no_settings_of_the_users(patch: pytest.MonkeyPatch) -> None:
    """Then the compilation is the user's own, without settings of autoamp's."""
    wrapper = torch._TorchCompileInductorWrapper("default", {}, None)
    reading = compat.CastReading(())
    asked = {"exact_casts": True, "reading": reading}
    assert inductor_casts.inductor(wrapper, **asked) is not wrapper
    hide(patch, "config")
    assert inductor_casts.inductor(wrapper, **asked) is wrapper


def no_counters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inductor_casts, "_counters", Counter)
    assert is_untold(compiled_report())


def another_schedule(patch: pytest.MonkeyPatch) -> None:
    """Without nests a kernel is one nest; with other nodes nothing is told."""
    hide(patch, "outer_fused_nodes")
    assert not is_untold(compiled_report())

    def other_nodes(*_: Any) -> Any:
        raise AttributeError("a node of another torch")

    patch.setattr(inductor_casts, "_fates", other_nodes)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        assert is_untold(compiled_report())


def no_translator(patch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    patch.delattr(InstructionTranslator, "current_tx")
    assert capture.tracing_backend() == (None, False)


def no_functorch(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "_functorch")
    assert not capture.is_batch(torch.ones(2))


def no_batches(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "is_legacy_batchedtensor", "is_batchedtensor")
    assert not capture.is_batch(torch.ones(2))


def no_rules_of_vmap(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "get_kernel")
    before = len(transforms._HELD)
    transforms.mend_batched_norms.__wrapped__()
    assert len(transforms._HELD) == before  # torch's rules stay


def no_way_past_transforms(patch: pytest.MonkeyPatch) -> None:
    names = "is_functorch_wrapped_tensor", "temporarily_clear_interpreter_stack"
    for name in (*names, "_set_fwd_grad_enabled"):
        hide(patch, name)
        patch.setattr(transforms, "inside_backward", lambda: True)
        inside = torch.vmap(lambda x: x if transforms.past_transforms(x) is None else 0)
        assert inside(torch.ones(2)).shape == (2,)
    # As if "_is_fwd_grad_enabled" were not in this torch.
    patch.setattr(capture, "_records_tangents", lambda: True)
    assert not capture.forward_mode()


def no_levels(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "_current_level")
    assert not capture.transforms_active()


def no_units(patch: pytest.MonkeyPatch) -> None:
    units = [n for n in vars(torch.cpu) if n.startswith("_is_a") and "supported" in n]
    assert len(units) > 2
    hide(patch, *units)
    assert device.cpu_low_precision_units.__wrapped__() == {}


def no_strategies(patch: pytest.MonkeyPatch) -> None:
    assert frames.frames_strategy("RUN_ONLY", "DEFAULT").cur_action.name == "RUN_ONLY"
    for name in ("eval_frame", "_FrameAction", "_FrameExecStrategy"):
        hide(patch, name)
        assert frames.frames_strategy("RUN_ONLY", "DEFAULT") is None
        frames.set_frames_action(no_units.__code__, "SKIP", "DEFAULT")
    hide(patch)
    patch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    frames.set_frames_action(no_units.__code__, "SKIP", "DEFAULT")
    assert gradients.never_captured(no_units) is no_units


def no_strategies_at_the_limit(patch: pytest.MonkeyPatch) -> None:
    """What is lost: past the limit what the model calls runs in fp32 too."""
    for name, calls_aside in (("nothing", 0), ("_FrameExecStrategy", 2)):
        hide(patch, name)
        model = autoamp.convert(Scaled({}), **OPTIONS)
        for call in range(LIMIT + 2):
            model.kept[f"key {call}"] = call
            model(torch.randn(4, 8))
        coverage = autoamp.report(model).coverage
        assert coverage.calls_aside == calls_aside


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * x.sum().sign().item())  # type: ignore[no-any-return]


def no_guards_of_modules(patch: pytest.MonkeyPatch) -> None:
    """What is lost: modules like those that options name run in fp32; that is said."""
    for name in ("nothing", "root", "get_child_managers"):
        hide(patch, name)
        model = nn.Sequential(Breaks(), Breaks())
        autoamp.convert(model, keep=["1"], **OPTIONS)
        model(torch.randn(4, 8))
        report = autoamp.report(model)
        wide = {op.module for op in report.ops if op.precision == "fp32"}
        assert not {"1.inner"} - wide or name != "nothing"
        said = any("from those like them" in why for _, why in report.skipped)
        assert said == (name != "nothing")
        low = {op.module for op in report.ops if op.precision == "bf16"}
        assert low <= {"0.inner"}


def no_word_of_new_modules(patch: pytest.MonkeyPatch) -> None:
    """What is lost: a module that a model is given later runs in fp32 by itself."""
    x = torch.randn(4, 8)
    for name in ("register_module_module_registration_hook", "nothing"):
        hide(patch, name)
        hooks = "_global_module_registration_hooks"
        patch.setattr(nn.modules.module, hooks, OrderedDict())
        told_of_calls._HOOK.clear()
        model = autoamp.convert(mlp(), **OPTIONS)
        model.append(nn.Linear(8, 8))
        wide = nn.functional.linear(x, model[-1].weight, model[-1].bias)
        assert torch.equal(model[-1](x), wide) == (name != "nothing")


def no_word_of_onednn(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "_is_mkldnn_bf16_supported")
    assert not recurrent.onednn_has_bf16()


def no_answers_to_dynamo(patch: pytest.MonkeyPatch) -> None:
    """Then an error of Dynamo's ends the call, which is made again in Python."""
    error = RuntimeError("of Dynamo")
    assert frames.may_be_left(error)
    hide(patch, "ResumePrologueTracingError")
    assert frames.may_be_left(error)
    patch.setattr(frames, "ConvertFrameReturn", None)  # as if "ConvertFrameReturn" were
    assert not frames.may_be_left(error)  # not in this torch


def no_guards_that_tell(patch: pytest.MonkeyPatch) -> None:
    """Then nothing is known to change, and the recompile limit is what ends it."""
    names = ("check_verbose", "guard_manager")
    for name, finds in (("nothing", True), *((name, False) for name in names)):
        hide(patch, name)
        model = autoamp.convert(Appends([]), **OPTIONS)
        for _ in range(4):
            model(torch.randn(4, 8))
        said = [why for _, why in autoamp.report(model).skipped]
        assert any("grows" in why for why in said) == finds


def no_options_for_some_code(patch: pytest.MonkeyPatch) -> None:
    """What is lost: a graph for each number, and calls that compute nothing count."""
    options = ("allow_unspec_int_on_nn_module", "allow_empty_graphs")
    graphs = []
    for names, calls in (((), 0), (options, 1)):
        hide(patch, *names)
        model = autoamp.convert(Counts(0), **OPTIONS)
        for _ in range(LIMIT):
            model(torch.randn(4, 8))
        graphs.append(len(autoamp.report(model).graphs))
        other = autoamp.convert(Counted(), **OPTIONS)
        other.parameter_count()
        assert autoamp.report(other).coverage.calls == calls
    assert graphs[0] < graphs[1]


def no_regions(patch: pytest.MonkeyPatch) -> None:
    """Then Dynamo makes regions again in its own way."""
    kind = torch._dynamo.variables.GradModeVariable
    theirs = kind.fn_name, kind.module_name
    with regions.regions_begin_when_entered():
        assert kind.fn_name is not theirs[0]
    assert (kind.fn_name, kind.module_name) == theirs
    for name in ("variables", "GradModeVariable"):
        hide(patch, name)
        with regions.regions_begin_when_entered():
            assert (kind.fn_name, kind.module_name) == theirs
    hide(patch)
    patch.delattr(kind, "module_name")
    with regions.regions_begin_when_entered():
        assert kind.fn_name is theirs[0]


def no_transforms(patch: pytest.MonkeyPatch) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    assert gradients.direct_apply(Double) != Double.apply
    hide(patch, "_are_functorch_transforms_active")
    assert gradients.direct_apply(Double) == Double.apply


def no_grad_dtype(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "grad_dtype")
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert not gradients.accumulate_in(half, torch.float32)


def no_ddp(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "DistributedDataParallel")
    assert ddp.active_ddp() is None
    assert ddp.reduced_by_ddp(mlp()) == []


def no_fake_store(patch: pytest.MonkeyPatch) -> None:
    """Then the ranks that do not exist meet in a store of torch's own."""
    hide(patch, "FakeStore")
    assert groups.begin_fake_group(1, 2)
    assert torch.distributed.get_rank() == 1
    torch.distributed.destroy_process_group()


def no_fake_group(patch: pytest.MonkeyPatch) -> None:
    """Then no mesh whose devices share layers can be planned."""
    name = "torch.testing._internal.distributed.fake_pg"
    patch.setitem(sys.modules, name, None)
    assert not groups.begin_fake_group(0, 2)


class _Reducer:
    """What compat/distributed/ddp.py asks of a DistributedDataParallel."""

    def __init__(self, state: Any = None) -> None:
        self._comm_hooks = [] if state is None else [(None, state)]
        self._join_config = SimpleNamespace(enable=True)

    def _get_ddp_logging_data(self) -> dict[str, str]:
        return {}


def no_hooks_of_ddp(patch: pytest.MonkeyPatch) -> None:
    """Where hooks or `join()` cannot be seen, gradients are looked at, ranks agree."""
    state = SimpleNamespace(error_dict={0: torch.full((2,), math.nan)})
    reducer = _Reducer(state)
    assert ddp.is_joining(reducer)
    assert ddp.has_communication_hook(reducer)
    assert not ddp.has_communication_hook(_Reducer())
    ddp.forget_feedback(reducer)
    assert state.error_dict[0].tolist() == [0, 0]
    for name in ("_comm_hooks", "_get_ddp_logging_data"):
        hide(patch, name)
        assert ddp.has_communication_hook(_Reducer())
    hide(patch, "_join_config", "enable")
    assert not ddp.is_joining(reducer)
    hide(patch, "error_dict")
    ddp.forget_feedback(reducer)


def no_records_of_fsdp(patch: pytest.MonkeyPatch) -> None:
    """Where FSDP's records cannot be read, shards are gathered as FSDP gathers them."""
    patch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace())
    assert fsdp.uses_fsdp()
    assert fsdp.sharded_parameters(mlp()) == []

    class Sharding(nn.Linear):
        def _get_fsdp_state(self) -> Any:
            group = SimpleNamespace(fsdp_params=[record])
            return SimpleNamespace(_fsdp_param_groups=[group], _fsdp_param_group=group)

    record = SimpleNamespace(_unsharded_param=torch.ones(1))
    torchs = SimpleNamespace(FSDPModule=Sharding)
    patch.setitem(sys.modules, "torch.distributed.fsdp", torchs)
    ((group, found),) = fsdp.sharded_parameters(Sharding(1, 1))
    assert found is record
    assert not fsdp.may_gather_low(group, record)
    assert fsdp.whole_parameter(record) is record._unsharded_param
    hide(patch, "_fsdp_param_groups")
    assert fsdp.sharded_parameters(Sharding(1, 1)) == [(group, record)]
    one_of_each = ("_fsdp_param_groups", "_fsdp_param_group")
    for names in (["fsdp_params"], one_of_each, ["FSDPModule"]):
        hide(patch, *names)
        assert fsdp.sharded_parameters(Sharding(1, 1)) == []
    hide(patch, "_unsharded_param")
    assert fsdp.whole_parameter(record) is None


def no_stages_and_no_store(patch: pytest.MonkeyPatch) -> None:
    """Then stages skip steps by themselves, and ranks do not shake hands."""

    class Stage:
        submod, group = mlp(), object()

    stage = Stage()
    pipelining = SimpleNamespace(_PipelineStageBase=Stage)
    patch.setitem(sys.modules, "torch.distributed.pipelining.stage", pipelining)
    assert groups.stage_groups([stage.submod[0]]) == [stage.group]
    assert groups.stage_groups([mlp()]) == []
    hide(patch, "_PipelineStageBase")
    assert groups.stage_groups([stage.submod]) == []
    hide(patch, "_get_default_store")
    assert groups.default_store() is None


def no_memory_of_dtensors(patch: pytest.MonkeyPatch) -> None:
    """Then a rank's part is asked for, and sums over ranks are torch's own."""

    class Part:
        device_mesh = SimpleNamespace(size=lambda _: 2, get_group=lambda _: None)

    memory = torch.ones(2)
    held = torch.Tensor._make_subclass(type("Held", (Tensor,), {}), memory)
    held.device_mesh, held._local_tensor = Part.device_mesh, memory
    held.to_local = memory.clone
    assert compat.own_memory(held) is memory
    hide(patch, "_local_tensor")
    assert compat.own_memory(held) is not memory
    assert torch.equal(compat.own_memory(held), memory)
    held.placements = [Partial("sum")]
    hide(patch, "all_to_all_single")
    assert compat.scattered_sum(held, [Shard(0)], torch.float32) is None


def no_buckets(patch: pytest.MonkeyPatch) -> None:
    """Where there is no DDPOptimizer, a graph is compiled as a whole."""
    whole, gm = object(), SimpleNamespace()

    def backend(given: Any, inputs: Any) -> Any:
        return whole if given is gm else None

    patch.setitem(sys.modules, "torch._dynamo.backends.distributed", None)
    hide(patch, "backend_compile_fn", "_param_name_to_source")
    assert ddp.in_buckets(backend, gm, [], _Reducer()) is whole
    assert ddp.without_buckets(backend) is backend


def no_task_id(patch: pytest.MonkeyPatch) -> None:
    hide(patch, "_current_graph_task_id")
    assert not gradients.inside_backward()


def no_addresses(patch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    hide(patch, "_data_address")
    assert tensors.data_addresses([x]) == [x.data_ptr()]
    assert tensors.lazy_clone(x) is None


def no_hints(patch: pytest.MonkeyPatch) -> None:
    class Plain:
        """A size whose shape environment answers nothing."""

        node = None

    assert tracing.hint(Plain()) == 1
    assert tracing.size_with(Plain(), {}) == 1


def no_sources(patch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    first, second = graph.placeholder("a"), graph.placeholder("b")
    graph.output((first, second))

    class Source:
        def name(self) -> str:  # a method, as in older versions
            return "L['x']"

    first._dynamo_source = Source()
    assert not hasattr(second, "_dynamo_source")
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert tracing.placeholder_sources(gm) == ["L['x']", ""]


def no_fp32_precision(patch: pytest.MonkeyPatch) -> None:
    """The older switches say which fp32 products are computed in TF32."""
    assert hasattr(torch.backends.cudnn.conv, "fp32_precision")
    older = "allow_tf32"
    for matmul, cudnn in ((False, True), (True, False)):
        matmul_switch = SimpleNamespace(**{older: matmul})
        backends = SimpleNamespace(
            cuda=SimpleNamespace(matmul=matmul_switch),
            cudnn=SimpleNamespace(**{older: cudnn}),
        )
        patch.setattr("autoamp.compat.fp32_precision._BACKENDS", backends)
        assert compat.tf32_kinds() == ({"matmul"} if matmul else {"conv", "rnn"})
    patch.setattr("autoamp.compat.fp32_precision._BACKENDS", SimpleNamespace())
    assert compat.tf32_kinds() == frozenset()


def no_runs_of_nodes(patch: pytest.MonkeyPatch) -> None:
    """Numbers made on the meta device then break a graph, and nothing else."""
    patch.delattr(torch._dynamo.utils, "run_node")
    with on_meta.fakes_on_meta():
        assert not hasattr(torch._dynamo.utils, "run_node")


def no_skip_reasons(patch: pytest.MonkeyPatch) -> None:
    """A layer is known by its file then, and where that is unknown it stays fp32."""

    class Frame:
        f_code = nn.Linear.forward.__code__
        f_locals: ClassVar = {"self": nn.Linear(2, 2)}

    class Skipped:
        skip_reason = "another"
        guarded_code = None

    assert not layers.layer_left(Frame, Skipped)
    Skipped.skip_reason = layers._IN_TORCH
    assert layers.layer_left(Frame, Skipped)
    Skipped.skip_reason = "another"
    hide(patch, "skip_reason")
    assert layers.layer_left(Frame, Skipped)
    for rules in ("trace_rules", "check"):
        hide(patch, "skip_reason", rules)
        assert not layers.layer_left(Frame, Skipped)
    assert layers.layer_captured(object(), Frame, None, None) is None


def no_entries(patch: pytest.MonkeyPatch) -> None:
    """Then what others have compiled of a shared code object counts as ours."""

    def double(x: Tensor) -> Tensor:
        return 2 * x

    torch.compile(double, backend="eager")(torch.ones(2))
    assert frames.entries_of(double.__code__)
    hide(patch, "_debug_get_cache_entry_list")
    assert frames.entries_of(double.__code__) == []


def no_custom_functions(patch: pytest.MonkeyPatch) -> None:
    """Then a custom Function is not looked into, and runs as it is."""
    assert compat.CUSTOM_FUNCTION.__name__ == "autograd_function_apply"
    patch.setattr(compat, "CUSTOM_FUNCTION", None)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 3 * grad

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Double.apply(x)
            return result

    x = torch.ones(2, requires_grad=True)
    result = autoamp.convert(Model(), precision="bf16")(x)
    result.sum().backward()
    assert result.tolist() == [2, 2]
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def no_cpu_attention(patch: pytest.MonkeyPatch) -> None:
    """Then attention keeps torch's own backward, and is left as it is written."""
    query = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    given = (query, query, query, None, False, None)
    assert cpu_attention.with_fp32_backward(*given) is not None
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    for names in (["_fused_sdp_choice"], [kernel], [f"{kernel}_backward"]):
        hide(patch, *names)
        assert compat.cpu_attention() is None
    patch.setattr(cpu_attention, "_KERNELS", None)
    assert cpu_attention.with_fp32_backward(*given) is None
    result = cpu_attention.attention(query, query, query)
    assert result.grad_fn is not None
    assert result.grad_fn.name().startswith("ScaledDotProduct")


def no_norms_of_many_tensors(patch: pytest.MonkeyPatch) -> None:
    """Then the guard takes the largest magnitude of each gradient by itself."""
    grads = [torch.tensor([1.0, -2.0]), torch.tensor([torch.nan, 1.0])]
    largest = list(compat.gradients.largest_of(grads))
    hide(patch, "_foreach_norm")
    alone = list(compat.gradients.largest_of(grads))
    torch.testing.assert_close(alone, largest, equal_nan=True)
    assert alone[0] == 2
    assert alone[1].isnan()


def no_kernels_of_softmax(patch: pytest.MonkeyPatch) -> None:
    """Then attention's weights and their gradients are computed by plain ops."""
    torch.manual_seed(0)
    scores, grad = torch.randn(3, 5), torch.randn(3, 5)
    scores[1] = -torch.inf
    weights = compat.safe_softmax(scores)
    slopes = compat.softmax_gradient(grad, weights)
    hide(patch, "_safe_softmax", "_softmax_backward_data")
    assert torch.allclose(compat.safe_softmax(scores), weights)
    assert torch.allclose(compat.softmax_gradient(grad, weights), slopes, atol=1e-6)


def no_total_norm(patch: pytest.MonkeyPatch) -> None:
    assert compat.TOTAL_NORM[1] == "_get_total_norm"
    patch.setattr(compat, "TOTAL_NORM", None)
    autoamp.enable()
    autoamp.disable()


def no_word_of_authors(patch: pytest.MonkeyPatch) -> None:
    """Then a custom op is one that nobody has said anything of, and stays fp32."""
    library = torch.library.Library("faults", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    for key in ("CPU", "Meta"):
        library.impl("twice", lambda x: x + x, key)
    torch.library.register_autocast("faults::twice", "cpu", torch.bfloat16, lib=library)
    op = torch.ops.faults.twice.default
    assert compat.registered_dtype(op, "cpu") == torch.bfloat16
    hide(patch, "py_kernels", "custom_ops")
    assert compat.registered_dtype(op, "cpu") is None
    for name in ("_dispatch_has_kernel_for_dispatch_key", "_dispatch_key_for_device"):
        hide(patch)
        assert compat.has_autocast_kernel(op, "cpu")
        hide(patch, name)
        assert not compat.has_autocast_kernel(op, "cpu")

    @torch.library.custom_op("faults::defined", mutates_args=())
    def defined(x: Tensor) -> Tensor:
        return x + x

    defined.register_autocast("cpu", torch.bfloat16)
    op = torch.ops.faults.defined.default
    hide(patch)
    assert compat.registered_dtype(op, "cpu") == torch.bfloat16
    for name in ("OPDEFS", "_autocast_dtype"):
        hide(patch, name)
        assert compat.registered_dtype(op, "cpu") is None


def no_callback_of_frames(patch: pytest.MonkeyPatch) -> None:
    """Modes are put back all the same; Dynamo's callback stays as it is."""
    patch.delattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback")
    without = runpy.run_path(process.__file__)["Modes"]
    modes = without()
    torch.set_grad_enabled(False)
    modes.restore()
    assert torch.is_grad_enabled()


def no_encoder_layer(patch: pytest.MonkeyPatch) -> None:
    """Then the layer is one op as before, and the op stays fp32."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    hide(patch, "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
    op = torch._transformer_encoder_layer_fwd
    assert not encoder.is_encoder_layer(op, (x,))
    converted = autoamp.convert(copy.deepcopy(layer), **BF16)
    with torch.no_grad():
        assert torch.equal(converted(x), layer(x))
    (row,) = autoamp.report(converted).ops
    assert (row.op, row.precision) == (
        "aten::_transformer_encoder_layer_fwd.default",
        "fp32",
    )


def no_word_of_an_export(patch: pytest.MonkeyPatch) -> None:
    """Then a converted model inside `torch.export` says less of why it ran in fp32."""
    assert not capture.is_exporting()
    hide(patch, "is_exporting")
    assert not capture.is_exporting()


ALONE = [
    no_callback_of_frames,
    no_word_of_authors,
    no_skip_reasons,
    no_entries,
    no_custom_functions,
    no_cpu_attention,
    no_kernels_of_softmax,
    no_norms_of_many_tensors,
    no_total_norm,
    no_hooks_of_ddp,
    no_records_of_fsdp,
    no_stages_and_no_store,
    no_memory_of_dtensors,
    no_buckets,
    no_backends,
    no_layouts,
    no_exact_casts,
    no_schedule,
    no_settings_of_the_users,
    no_counters,
    another_schedule,
    no_translator,
    no_functorch,
    no_batches,
    no_rules_of_vmap,
    no_way_past_transforms,
    no_levels,
    no_units,
    no_strategies,
    no_strategies_at_the_limit,
    no_guards_of_modules,
    no_word_of_new_modules,
    no_word_of_onednn,
    no_answers_to_dynamo,
    no_guards_that_tell,
    no_options_for_some_code,
    no_regions,
    no_transforms,
    no_grad_dtype,
    no_ddp,
    no_fake_store,
    no_fake_group,
    no_task_id,
    no_addresses,
    no_hints,
    no_sources,
    no_runs_of_nodes,
    no_fp32_precision,
    no_encoder_layer,
    no_word_of_an_export,
]


@pytest.mark.parametrize("check", ALONE)
def test_fallback(
    check: Callable[[pytest.MonkeyPatch], None], figures: Figures
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check(patch)
    figures.count("fallbacks alone")


_ASKED = re.compile(r'(?:getattr|hasattr)\(\s*[^()]*?(?:\([^()]*\))?,\s*"(\w+)"')
_NOT_OF_TORCH = {
    # Of a tensor, a node or an optimizer, which has them or not: tests elsewhere.
    *(
        "to_local",
        "device_mesh",
        "reduce_op",
        "_fsdp_flattened",
        "fsdp_pre_all_gather",
        "found_inf",
        "grad_dtype",
    ),
    *("callback", "error_on_graph_break", "tensor_source", "node", "shape_env"),
    *("hint", "expr", "subs", "apply", "_get_data_attr", "__name__", "_dynamo_source"),
    *("__code__", "__dict__", "__module__", "children"),
    "metadata",
    *("dtype", "__func__", "__wrapped__"),
}


def test_every_name_compat_asks_for_is_taken_away_here() -> None:
    asked = {
        name
        for file in COMPAT.rglob("*.py")
        for name in _ASKED.findall(file.read_text())
    }
    here = "".join(file.read_text() for file in HERE.glob("test_faults_*.py"))
    missing = {name for name in asked if f'"{name}"' not in here}
    assert len(asked) > 15
    assert not missing


# -- ops that are missing --------------------------------------------------------------


def test_ops_this_torch_lacks_are_left_out_of_the_lists(
    monkeypatch, figures: Figures
) -> None:
    """The built-in rules name them; the model runs, and says what has no rule."""
    from autoamp.rules import parse, table

    gone = ("aten::linear", "aten::tanh", "aten::scaled_dot_product_attention")
    model, x = mlp(), torch.randn(4, 8)
    exact = model(x)
    exists = parse.exists
    monkeypatch.setattr(parse, "exists", lambda op: op not in gone and exists(op))
    table._load_builtin.cache_clear()
    try:
        autoamp.convert(model, **FP16)
        y = model(x)
        y.sum().backward()
        report = autoamp.report(model)
        unlisted = {row.op for row in report.ops if not row.listed}
        assert unlisted == {f"{op}.default" for op in gone[:2]}
        assert not any(row.is_low for row in report.ops if "linear" in row.op)
        assert "Ops in no list" in report.full()
        assert torch.allclose(y, exact)
        figures.count("ops taken away", len(gone))
    finally:
        monkeypatch.undo()
        table._load_builtin.cache_clear()
    again = autoamp.convert(copy.deepcopy(model), **BF16)
    again(x)
    assert any(row.is_low for row in autoamp.report(again).ops)
