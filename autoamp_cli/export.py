"""`autoamp export`: a mixed-precision model as a file, for another runtime."""

from __future__ import annotations

import os
from typing import Any

import click

from autoamp_cli.asked import (
    asking,
    convert_options,
    with_convert_options,
    with_name,
)
from autoamp_cli.commands import command
from autoamp_cli.outputs import as_json, refuse_unwritable, with_json, write
from autoamp_cli.words import TARGETS


@command()
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
@with_json
@with_convert_options
@with_name
def export(
    name: str,
    *,
    batch: int | None,
    sequence: int | None,
    target: Any,
    out: str,
    dynamic: bool,
    json_to: str | None,
    **given: Any,
) -> None:
    """Writes a model as a file, in mixed precision.

    NAME is as for explain.  The file is an exported program (pt2), a compiled package
    (aoti) or ONNX, and carries its plan, which `autoamp diff` reads.

    \b
    Examples:
      autoamp export models.bert:example --out bert.pt2
      autoamp export models.bert:example --target onnx --precision fp16 --out bert.onnx
      autoamp diff bert.pt2 bert.onnx
    """
    options = convert_options(given)
    refuse_unwritable(json_to)
    with asking(name, "exporting"):
        from autoamp import api
        from autoamp.tools.named import made_by

        made = made_by(name, batch=batch, sequence=sequence, trains=False, caches=False)
        program = api.export(
            made.model,
            made.args,
            made.kwargs,
            dynamic_shapes=_any_sizes(made) if dynamic else None,
            target=target,
            out=out,
            **options,
        )
    facts = _facts(made.model, program, out)
    if json_to:
        write(json_to, as_json(facts))
    if json_to != "-":
        click.echo(_told(facts))


def _any_sizes(made: Any) -> Any:
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
    shapes = {name: spec(value) for name, value in bound.items()}
    for name, kind in kinds.items():
        if kind is inspect.Parameter.VAR_KEYWORD and name in shapes:
            shapes |= shapes.pop(name)
    return shapes


def _facts(model: Any, program: Any, out: str) -> dict[str, Any]:
    """The sizes of the file that was written, in bytes, and how many ops run low."""
    size = os.path.getsize(out)
    size += os.path.getsize(f"{out}.data") if os.path.exists(f"{out}.data") else 0
    tensors = [*model.parameters(), *model.buffers()]
    plan = program.graph_module.meta["custom"]["autoamp"]
    ops = plan["report"]["ops"]
    return {
        "schema": 1,
        "file": out,
        "bytes": size,
        "bytes_fp32": sum(t.numel() * 4 for t in tensors if t.is_floating_point()),
        "ops": len(ops),
        "low": sum(op["precision"] != "fp32" for op in ops),
        "compute_dtype": plan["report"]["compute_dtype"],
    }


def _told(facts: dict[str, Any]) -> str:
    """One line about the file."""
    low, ops, dtype = (facts[name] for name in ("low", "ops", "compute_dtype"))
    what = f"{low} of {ops} float ops in {dtype}" if low else "everything in fp32"
    sizes = [f"{facts[name] / 1e6:.2f} MB" for name in ("bytes", "bytes_fp32")]
    return "{file}: {} (weights in fp32: {}), {what}".format(*sizes, what=what, **facts)
