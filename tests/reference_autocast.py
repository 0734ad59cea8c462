"""What `torch.autocast` does on a device, done to the tensors of this CPU.

`autocast_of("cuda", torch.bfloat16)` is a region in which ops compute in the dtypes
that they have under autocast on a GPU.  No code of the package is used, so that the
package can be held against it.

Torch's own autocast is a set of kernels under a dispatch key of the device.  The
kernels here are written in Python from `autocast_lists.toml`, and registered under the
key of a device that torch has no lists for.  The region adds that key to every call, so
ops inside of torch's own functions are seen as well, and casts are differentiated.
"""

from __future__ import annotations

import contextlib
import functools
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

LISTS: dict[str, dict[str, list[str]]] = {
    device: {policy: names.split() for policy, names in lists.items()}
    for device, lists in tomllib.loads(
        Path(__file__).with_name("autocast_lists.toml").read_text()
    ).items()
}
"""Device to policy to the names of ops, a default overload without its name."""

LAYERS = "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data"
LAYERS += " rnn_relu.input rnn_relu.data"
"""Recurrent layers, which call `_cudnn_rnn` on GPUs: autocast casts all it is given.

CPUs lack that op, so the calls that lead to it on a GPU stand for it.
"""

_SPARE = {"cuda": "ipu", "cpu": "hpu"}
"""Devices for which torch has a dispatch key of autocast and no kernels."""

Kernel = Callable[..., Any]


@contextlib.contextmanager
def autocast_of(device: str, low: torch.dtype) -> Iterator[None]:
    """A region in which CPU tensors are treated as by autocast on `device`.

    Each use of a weight has a cast of its own.  The backward belongs outside, as that
    of torch's autocast does.
    """
    _register(device)
    spare = _SPARE[device]
    region = functools.partial(autocast_of, device, low)
    recomputed = checkpoint.__wrapped__.__kwdefaults__
    before = torch.is_autocast_enabled(spare), torch.is_autocast_enabled("cuda")
    contexts, torch_dtype = recomputed["context_fn"], torch.get_autocast_dtype(spare)
    torch.set_autocast_dtype(spare, low)
    torch.set_autocast_enabled(spare, True)
    # Torch's fast paths ask for this flag, and CPU tensors have none of its kernels.
    torch.set_autocast_enabled("cuda", device == "cuda")
    recomputed["context_fn"] = lambda: (contextlib.nullcontext(), region())
    try:
        with torch.autocast("cpu", enabled=False), _included(device):
            yield
    finally:
        recomputed["context_fn"] = contexts
        torch.set_autocast_dtype(spare, torch_dtype)
        torch.set_autocast_enabled(spare, before[0])
        torch.set_autocast_enabled("cuda", before[1])


def operators(device: str) -> dict[torch._ops.OpOverload, str]:
    """The ops that autocast treats on `device`, each with its policy's name."""
    listed = {p: list(names) for p, names in LISTS[device].items()}
    if device == "cuda":
        listed["lower_precision_fp"] += LAYERS.split()
    return {
        op: policy
        for policy, names in listed.items()
        for op in map(_operator, names)
        if op is not None
    }


def _operator(name: str) -> torch._ops.OpOverload | None:
    """The op of this name, or None where this torch has no such op."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None)


def _key(device: str) -> Any:
    return getattr(torch._C.DispatchKey, f"Autocast{_SPARE[device].upper()}")


def _included(device: str) -> contextlib.AbstractContextManager[Any]:
    guard: Any = torch._C._IncludeDispatchKeyGuard(_key(device))
    return guard


@functools.cache
def _register(device: str) -> tuple[Library, Library]:
    """The kernels of all listed ops, kept for the life of the process."""
    every, aten = Library("_", "IMPL"), Library("aten", "IMPL")
    every.fallback(fallthrough_kernel, _key(device).name)
    for op, policy in operators(device).items():
        kernel = functools.partial(_POLICIES[policy], op, _SPARE[device])
        aten.impl(op, _alone(op, kernel, device), _key(device).name)
    return every, aten


def _alone(op: Kernel, kernel: Kernel, device: str) -> Kernel:
    """`kernel`, whose own calls are not treated again."""
    keys = torch._C.DispatchKeySet(_key(device))

    def run(*args: Any, **kwargs: Any) -> Any:
        # A model may switch autocast off for some of its calls.
        off = device == "cuda" and not torch.is_autocast_enabled(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return (op if off else kernel)(*args, **kwargs)

    return run


# -- the policies, as in ATen/autocast_mode.h ------------------------------------------


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda v: v.to(dtype) if _eligible(v) else v, values)


def _lower(op: Kernel, spare: str, *args: Any, **kwargs: Any) -> Any:
    low = torch.get_autocast_dtype(spare)
    return op(*_cast(args, low), **_cast(kwargs, low))


def _fp32(op: Kernel, spare: str, *args: Any, **kwargs: Any) -> Any:
    return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _fp32_result(op: Any, spare: str, *args: Any, **kwargs: Any) -> Any:
    """Asks the op for an fp32 result, unless the caller has named a dtype."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if _eligible(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    return op(**given)


def _fp32_appended(op: Any, spare: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the overload that takes the dtype of the result."""
    defaults = {"norm.Scalar": {"p": 2}, "norm.ScalarOpt_dim": {"keepdim": False}}
    names = [argument.name for argument in op._schema.arguments]
    name = op.__name__
    given = {**defaults[name], **dict(zip(names, args, strict=False)), **kwargs}
    given["dtype"] = torch.float32 if _eligible(args[0]) else args[0].dtype
    if name == "norm.Scalar":
        return torch.ops.aten.norm.ScalarOpt_dtype(**given)
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(**given)


def _promote(op: Kernel, spare: str, *args: Any, **kwargs: Any) -> Any:
    """Casts to fp32 where any argument is fp32; all are low otherwise."""
    floats = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if _eligible(t)}
    low = torch.get_autocast_dtype(spare)
    if not floats <= {low, torch.float32}:
        raise RuntimeError("Unexpected floating ScalarType in autocast")
    widest = torch.float32 if torch.float32 in floats else low
    return op(*_cast(args, widest), **_cast(kwargs, widest))


def _banned(op: Kernel, spare: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"{op} is unsafe to autocast")


_POLICIES: dict[str, Kernel] = {
    "lower_precision_fp": _lower,
    "fp32": _fp32,
    "fp32_set_opt_dtype": _fp32_result,
    "fp32_append_dtype": _fp32_appended,
    "promote": _promote,
    "banned": _banned,
}
