"""Whether low precision pays on the devices of this machine, in sentences."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import torch

from autoamp import compat
from autoamp.dtypes import LOW_TABLE, LowDtype
from autoamp.passes.decide.devices import device_of
from autoamp.passes.speeds.clock import device_name

_PACKAGES = (
    "autoamp",
    "torch",
    "networkx",
    "rich",
    "transformers",
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "peft",
    "timm",
    "torchvision",
)


def versions() -> list[tuple[str, str]]:
    """The name and version of each component that matters in a bug report."""
    rows = [("python", f"{platform.python_version()} ({sys.executable})")]
    rows.append(("system", platform.platform()))
    for name in _PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    # `torch.__version__` names the build ("+cu130"); the wheel's metadata may not.
    rows = [(n, str(torch.__version__) if n == "torch" else v) for n, v in rows]
    rows.append(("CUDA", str(torch.version.cuda or "none in this torch")))
    return rows


def devices() -> list[tuple[str, list[str]]]:
    """Each device, with a sentence per low dtype: whether it is fast, or why not."""
    rows = [(device_name(torch.device("cpu")), [_on_cpu(row) for row in LOW_TABLE])]
    if torch.cuda.is_available():
        rows += [_cuda(index) for index in range(torch.cuda.device_count())]
    return rows


def _cuda(index: int) -> tuple[str, list[str]]:
    try:
        major, minor = torch.cuda.get_device_capability(index)
        name = f"cuda:{index}  {torch.cuda.get_device_name(index)}, "
        name += f"compute capability {major}.{minor}"
        where = torch.device("cuda", index)
        return name, [_on_cuda(row, where) for row in LOW_TABLE]
    except Exception as error:  # noqa: BLE001 (users ask this because CUDA fails)
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"cuda:{index}", [f"cannot be used: {problem}"]


def _on_cpu(low: LowDtype) -> str:
    name, unit = low.name, compat.cpu_low_precision_units().get(low.dtype)
    if unit is None:
        return (
            f"{name} is slower than fp32: this CPU has no units that multiply it. "
            f"No model is converted to {name} unless do-no-harm is switched off"
        )
    where = "matrix tiles" if unit.startswith("amx") else "vector instructions"
    return f"{name} pays for matrix products and convolutions ({where}, {unit})"


def _on_cuda(low: LowDtype, where: torch.device) -> str:
    if device_of(where, low.dtype).pays:
        return f"{low.name} pays: tensor cores"
    return (
        f"{low.name} will be slow: it needs compute capability {low.cuda_capability} "
        f"or higher. No model is converted to {low.name} unless do-no-harm is switched "
        "off"
    )
