"""`autoamp export`: a mixed-precision model as a file, for another runtime."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from autoamp_cli.asked import asking, convert_options, with_convert_options
from autoamp_cli.factory import Made
from autoamp_cli.words import TARGETS


@click.command()
@click.option(
    "--target",
    default="pt2",
    metavar="T",
    show_default=True,
    help=", ".join(TARGETS) + ".",
)
@click.option("--out", required=True, metavar="FILE", help="The file to write.")
@click.option(
    "--dynamic",
    is_flag=True,
    help="Let each size of the arguments be any size, where the model allows it.",
)
@with_convert_options
@click.argument("factory", metavar="MODULE:FACTORY")
def export(factory: str, *, target: Any, out: str, dynamic: bool, **given: Any) -> None:
    """Writes the model that MODULE:FACTORY makes as a file, in mixed precision.

    FACTORY() returns (model, args) or (model, args, kwargs).  The file is an exported
    program (pt2), a compiled package (aoti) or ONNX, and carries its plan, which
    `autoamp diff` reads.

    \b
    Examples:
      autoamp export models.bert:example --out bert.pt2
      autoamp export models.bert:example --target onnx --precision fp16 --out bert.onnx
      autoamp diff bert.pt2 bert.onnx
    """
    from autoamp import api
    from autoamp_cli.factory import made_by

    options = convert_options(given)
    with asking(factory):
        made = made_by(factory)
        with _status(f"exporting {factory} for {target}"):
            program = api.export(
                made.model,
                made.args,
                made.kwargs,
                dynamic_shapes=_any_sizes(made) if dynamic else None,
                target=target,
                out=out,
                **options,
            )
    click.echo(_told(made.model, program, out))


def _any_sizes(made: Made) -> Any:
    """Every size of every tensor among the arguments as `torch.export.Dim.AUTO`."""
    import inspect

    import torch
    from torch.utils import _pytree as pytree

    def sizes(value: Any) -> Any:
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)

    def spec(value: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: sizes(leaf) if isinstance(leaf, torch.Tensor) else None, value
        )

    signature = inspect.signature(made.model.forward)
    bound = signature.bind(*made.args, **made.kwargs).arguments
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    found = {name: spec(value) for name, value in bound.items()}
    for name, kind in kinds.items():
        if kind is inspect.Parameter.VAR_KEYWORD and name in found:
            found |= found.pop(name)
    return found


def _told(model: Any, program: Any, out: str) -> str:
    """One line about the file that was written."""
    size = os.path.getsize(out)
    size += os.path.getsize(f"{out}.data") if os.path.exists(f"{out}.data") else 0
    tensors = [*model.parameters(), *model.buffers()]
    wide = sum(t.numel() * 4 if t.is_floating_point() else 0 for t in tensors)
    plan = program.graph_module.meta["custom"]["autoamp"]
    ops = plan["report"]["ops"]
    low = sum(op["precision"] != "fp32" for op in ops)
    dtype = plan["report"]["compute_dtype"]
    what = f"{low} of {len(ops)} float ops in {dtype}" if low else "everything in fp32"
    return f"{out}: {size / 1e6:.2f} MB (weights in fp32: {wide / 1e6:.2f} MB), {what}"


def _status(text: str) -> Any:
    """A spinner on stderr, in a terminal."""
    from rich.console import Console

    return Console(stderr=True, quiet=not sys.stderr.isatty()).status(text)
