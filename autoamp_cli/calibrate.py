"""`autoamp calibrate`: measures the speeds of this machine anew, and shows them."""

from __future__ import annotations

import click


@click.command()
@click.option("--device", default="", metavar="D", help="cpu or cuda; default: both.")
@click.option("--show", is_flag=True, help="Show the speeds that are kept already.")
def calibrate(device: str, show: bool) -> None:
    """Measures the speeds by which ops are priced, and keeps them.

    `convert` does so by itself where no speeds are kept.  Run this where they were
    measured on a busy machine, with nothing beside it.

    \b
    Example:
      autoamp calibrate
    """
    import torch
    from rich.console import Console

    from autoamp.calibrate.calibrated import device_for, is_off, measure_again
    from autoamp.calibrate.shown import speeds_table
    from autoamp.dtypes import usual_dtype

    if device not in ("", "cpu", "cuda"):
        raise click.BadParameter(f"{device!r} is neither cpu nor cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("this machine has no GPU that torch can use")
    if is_off():
        raise click.UsageError("AUTOAMP_CALIBRATE=0 switches measuring off: unset it")
    kinds = [device] if device else ["cpu", *["cuda"] * torch.cuda.is_available()]
    for kind in kinds:
        here, low = torch.device(kind), usual_dtype(on_cuda=kind == "cuda")
        if show:
            found = device_for(here, low, calibrate=True)
        else:
            found = measure_again(here, low)
        Console().print(speeds_table(found, low))
