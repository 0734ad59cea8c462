"""`autoamp calibrate`: measures the speeds of this machine anew, and shows them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from autoamp_cli.commands import command
from autoamp_cli.outputs import as_json, refuse_unwritable, with_json, write
from autoamp_cli.waiting import waiting

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from autoamp.passes.decide.devices import Curve, Device


@command()
@click.option("--device", default="", metavar="D", help="cpu or cuda; default: both.")
@click.option("--show", is_flag=True, help="Show the speeds that are kept already.")
@with_json
def calibrate(device: str, show: bool, json_to: str | None) -> None:
    """Measures the speeds by which ops are priced, and keeps them.

    `convert` does so by itself where no speeds are kept.  Run this where they were
    measured on a busy machine, with nothing beside it.

    \b
    Example:
      autoamp calibrate
    """
    if device not in ("", "cpu", "cuda"):
        raise click.BadParameter(
            f"{device!r}: the machine that is here is measured; give cpu or cuda"
        )
    refuse_unwritable(json_to)
    with waiting("measuring this machine"):
        speeds_of = _measured(device, show=show)
    if json_to:
        from autoamp.passes.decide.devices import figures_of

        each = {kind: figures_of(speeds) for kind, (speeds, _) in speeds_of.items()}
        write(json_to, as_json({"schema": 1, "devices": each}))
    if json_to != "-":
        from rich.console import Console

        for speeds, low in speeds_of.values():
            Console().print(_speeds_table(speeds, low))


def _measured(device: str, *, show: bool) -> dict[str, tuple[Device, torch.dtype]]:
    """The speeds of each device of this machine, and the low dtype they are for."""
    import torch

    from autoamp.passes.decide.devices import kind_of
    from autoamp.passes.speeds.speeds import device_for, is_off, measure_again

    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("this machine has no GPU that torch can use")
    if is_off():
        raise click.UsageError("AUTOAMP_CALIBRATE=0 switches measuring off: unset it")
    speeds_of = {}
    for kind in [device] if device else ["cpu", *["cuda"] * torch.cuda.is_available()]:
        here, low = torch.device(kind), kind_of(kind).usual_dtype
        speeds = (
            device_for(here, low, calibrate=True) if show else measure_again(here, low)
        )
        speeds_of[kind] = speeds, low
    return speeds_of


def _speeds_table(device: Device, low: torch.dtype) -> Table:
    """The figures by which ops on `device` are priced, fp32 beside `low`."""
    from rich.table import Table

    from autoamp.dtypes import HIGH_DTYPE, short_name

    both = device.high, device.low
    table = Table("", short_name(HIGH_DTYPE), short_name(low), title=device.name)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("memory bandwidth, GB/s", f"{device.bytes_per_ns:g}", "")
    table.add_row("start of an op, \u00b5s", f"{device.launch_ns / 1e3:.1f}", "")
    starts = (f"{rates.start_ns / 1e3:.1f}" for rates in both)
    table.add_row("start of a product, \u00b5s more", *starts)
    for rows in sorted({rows for rates in both for rows, _ in rates.products}):
        title = f"product of {rows:g} row{'' if rows == 1 else 's'}, GFLOP/s"
        table.add_row(title, *_flops(device, "matmul", rows))
    table.add_row("convolution, GFLOP/s", *_flops(device, "conv", 1))
    table.add_row("  of each channel, GFLOP/s", *_flops(device, "channelwise", 1))
    table.add_row("batched product, GFLOP/s", *_flops(device, "batched", math.inf))
    whole: Curve = ((1.0, device.bytes_per_ns),)
    table.add_row("light op, GB/s", *(_range(rates.light or whole) for rates in both))
    table.add_row("heavy op, GB/s", *(_range(rates.heavy or whole) for rates in both))
    table.add_row("cast, GB/s", _range(device.casts or whole), "")
    return table


def _flops(device: Device, kind: str, rows: float) -> list[str]:
    rates = (device.flops_per_ns(kind, rows, low=low) for low in (False, True))
    return [f"{rate:.3g}" for rate in rates]


def _range(curve: Curve) -> str:
    """The rates of a curve, from the least size to the largest."""
    return ", ".join(f"{rate:.3g}" for _, rate in curve)
