"""DeepSpeed's and Megatron's engines, as their sources have them, are left alone.

Neither library is installed: their classes are made in modules of their names.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import Tensor, nn

import autoamp
from tests.says import says
from tests.small_models import BF16 as OPTIONS
from tests.small_models import WIDTH, mlp

X = torch.randn(4, WIDTH)


class Engine(nn.Module):
    """What all engines are: a module that holds the model and calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class Wrapping:
    """An engine's optimizer: no torch.optim.Optimizer, but it holds and steps one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def made(where: str, name: str, *bases: type) -> type:
    """A class of that name, in a package of that name which has been imported."""
    package = where.partition(".")[0]
    sys.modules.setdefault(package, types.ModuleType(package))
    return type(name, bases, {"__module__": where})


@pytest.fixture(autouse=True)
def loaded(caplog) -> Iterator[None]:
    known = dict(sys.modules)
    caplog.set_level(logging.INFO, "autoamp")
    yield
    autoamp.disable()
    for name in [*sys.modules]:
        if name not in known and name.partition(".")[0] in ("deepspeed", "megatron"):
            del sys.modules[name]


CORE = "megatron.core.distributed"
BASES: dict[str, tuple[str, str]] = {
    "pipeline": ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    "float16": ("megatron.core.transformer.module", "MegatronModule"),
    "megatron ddp": (CORE, "_BaseDataParallel"),
    "zero": ("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer"),
    "chained": ("megatron.core.optimizer.optimizer", "MegatronOptimizer"),
}
"""The classes that these derive from."""

ENGINES = {
    "deepspeed": BASES["pipeline"],
    "pipeline": ("deepspeed.runtime.pipe.engine", "PipelineEngine"),
    "megatron": BASES["float16"],
    "float16": ("megatron.core.transformer.module", "Float16Module"),
    "megatron ddp": (f"{CORE}.distributed_data_parallel", "DistributedDataParallel"),
    "legacy ddp": ("megatron.model.distributed", "DistributedDataParallel"),
    "fsdp": ("megatron_fsdp.megatron_fsdp", "MegatronFSDP"),
}
OPTIMIZERS = {
    "zero": ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    "old zero": ("deepspeed.runtime.zero.stage2", "DeepSpeedZeroOptimizer"),
    "fp16": ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer"),
    "chained": ("megatron.core.optimizer.optimizer", "ChainedOptimizer"),
}


def foreign(name: str) -> type:
    """The class of an engine, or of an engine's optimizer."""
    base: type = Engine if name in ENGINES else Wrapping
    if name in BASES:
        base = made(*BASES[name], base)
    return made(*{**ENGINES, **OPTIMIZERS}[name], base)


def said(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]


def left(caplog, kind: type) -> bool:
    """Whether one line, and no more, says that an engine is left alone."""
    (line,) = said(caplog)
    says(line, kind.__name__)
    return "is left" in line


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("first", ["engine", "model"])
def test_the_automatic_mode_leaves_an_engine_and_what_is_inside(
    name: str, first: str, caplog
) -> None:
    model = mlp()
    expected = model(X)
    autoamp.enable(**OPTIONS)
    engine = foreign(name)(model)
    calls = (engine, engine.forward, model, engine)
    for call in calls if first == "engine" else (model,):
        for _ in range(3):
            assert torch.equal(call(X), expected)
    assert not any(autoamp.is_converted(each) for each in engine.modules())
    assert left(caplog, type(engine))


def test_a_model_converted_before_its_engine_was_made_is_reverted(caplog) -> None:
    autoamp.enable(**OPTIONS)
    model = mlp()
    model(X)
    assert autoamp.is_converted(model)
    engine = foreign("deepspeed")(model)
    for call in (engine, model, engine):
        call(X)
    assert not autoamp.is_converted(model)
    assert "DeepSpeedEngine" in said(caplog)[-1]


@pytest.mark.parametrize("name", ENGINES)
def test_convert_refuses_an_engine_and_what_is_inside_or_holds_one(
    name: str,
) -> None:
    model = mlp()
    engine = foreign(name)(model)
    for each in (engine, model, nn.Sequential(engine, nn.Linear(4, 4))):
        before = dict(vars(each))
        with pytest.raises(autoamp.UnsupportedModelError):
            autoamp.convert(each, **OPTIONS)
        assert vars(each) == before


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("mine.engine", "DeepSpeedEngine"),
        ("mine.deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("__main__", "Float16Module"),
        ("deepspeed.moe.layer", "MoE"),  # a layer of the library's is no engine
    ],
)
def test_another_class_of_that_name_or_package_is_converted(
    where: str, name: str
) -> None:
    foreign("deepspeed"), foreign("megatron")  # both libraries have been imported
    autoamp.enable(**OPTIONS)
    theirs = made(where, name, Engine)
    model = theirs(mlp())
    model(X)
    assert autoamp.is_converted(model)
    named = theirs(mlp())
    assert autoamp.is_converted(autoamp.convert(named, **OPTIONS))


# -- optimizers ------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_of_ours_is_put_on_an_optimizer_of_an_engine(name: str, caplog) -> None:
    model = autoamp.convert(mlp(), **OPTIONS)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = foreign(name)(inner)
    for _ in range(2):
        model(X).sum().backward()
        outer.step()
    assert "step" not in vars(inner)
    assert any(type(outer).__name__ in line for line in said(caplog))
    before = model[0].weight.detach().clone()
    model(X).sum().backward()
    inner.step()  # by itself it is an optimizer as any other
    assert "step" in vars(inner)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_convert_refuses_an_optimizer_of_an_engine(name: str) -> None:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = foreign(name)(inner)
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    wrapper = AcceleratedOptimizer(inner)
    wrapper.optimizer = outer
    AcceleratorState._reset_state(reset_partial_state=True)
    for each in (outer, wrapper):
        with pytest.raises(autoamp.OptionError):
            autoamp.convert(model, each, **OPTIONS)
    assert not autoamp.is_converted(model)


def test_a_function_that_the_library_compiles_is_left_alone() -> None:
    foreign("deepspeed")
    autoamp.enable(**OPTIONS)

    def product(x: Tensor) -> Tensor:
        return x @ x.T

    expected = product(X)
    theirs, mine = types.FunctionType(product.__code__, globals()), product
    theirs.__module__ = "megatron.core.fusions"
    assert torch.equal(torch.compile(theirs, backend="eager")(X), expected)
    assert not torch.equal(torch.compile(mine, backend="eager")(X), expected)
