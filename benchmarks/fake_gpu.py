"""A GPU that is not there: fake tensors of it, and their memory.

Fake tensors (`torch._subclasses.FakeTensorMode`) have shapes, dtypes, a device and
storages, and no data; autograd keeps and frees them as it does others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.optim import adam
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import include_paths, library_paths

from tests.fake_cuda import autocast, moved, on_cuda
from tests.models import Case

aten = torch.ops.aten

GRAIN = 512
"""Bytes of which torch's allocator for CUDA gives whole multiples."""

_GUARD = """
#include <new>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;
const Device gpu(DeviceType::CUDA, 0);

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const noexcept override { return gpu; }
  Stream getStream(Device) const noexcept override {
    return Stream(Stream::DEFAULT, gpu);
  }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag)
      const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
// Torch has read its registry of hooks: the object there, which has no fields, becomes
// one of this class.
auto* const hooks =
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
} // namespace
"""


@functools.cache
def load() -> None:
    """Autograd can go through fake tensors of a GPU from now on, in this process.

    A build of torch for CPUs has all of CUDA's rules for autocast, shapes and
    gradients; what it lacks is an object that says which GPU and stream are current,
    which autograd asks for.  Here a compiler makes one that does nothing.
    """
    if torch.version.cuda is not None:
        raise RuntimeError("a build of torch for CPUs is needed, and this one is not")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "guard.so")
        command = ["c++", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-"]
        command += [f"-I{path}" for path in include_paths()]
        command += [f"-L{path}" for path in library_paths()]
        command += ["-lc10", "-ltorch_cpu", "-o", str(made)]
        subprocess.run(command, input=_GUARD, text=True, check=True)
        ctypes.CDLL(str(made))


@contextlib.contextmanager
def region(mode: FakeTensorMode) -> Iterator[None]:
    """A region in which torch has an H100, for the fake tensors of `mode`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in _ANSWERS.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        # A count of steps, in a tensor that has no data.
        patch.setattr(adam, "_get_value", lambda x: 1 if isinstance(x, Tensor) else x)
        # Torch's own switches itself off where there is no GPU.
        patch.setattr(torch, "autocast", autocast)
        # Modules that hold fake tensors cannot be moved, not even to where they are.
        patch.setattr(nn.Module, "to", lambda self, *_, **__: self)
        gc.collect()
        gc.disable()  # collections would free memory at moments drawn by chance
        try:
            with mode, torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            gc.enable()


_ANSWERS = {
    "get_device_capability": (9, 0),
    "is_current_stream_capturing": False,
    "current_stream": None,
    "default_stream": None,
}
"""Functions of `torch.cuda` that autoamp calls, and what they say of the GPU."""


def on_fakes(case: Case, device: str, dtype: torch.dtype, mode: FakeTensorMode) -> Case:
    """The case with its model, in `dtype`, and a batch as fake tensors on a device."""
    if device == "cuda":
        load()
    model, batch = case.model().to(dtype), case.inputs(0)

    def inputs(_: int) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: on_cuda(t, mode, device), batch)

    return replace(case, build=lambda: moved(model, mode, device), inputs=inputs)


class Made(TorchDispatchMode):
    """Shows `see` each op, its arguments, and what it returns."""

    def __init__(self, see: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self._see = see

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo captures models in this mode, too."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.0  # whether gradients overflow
        if func is aten._fused_sdp_choice.default and args[0].is_cuda:
            return _attention(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._see(func, args, result)
        return result


def _attention(query: Tensor, *given: Any, **_: Any) -> int:
    """The kernel that torch takes on an H100; what it keeps is the same in cuDNN's."""
    mask = given[2] if len(given) > 2 else None
    if mask is None and query.dtype != torch.float32:
        return int(SDPBackend.FLASH_ATTENTION.value)
    return int(SDPBackend.EFFICIENT_ATTENTION.value)
