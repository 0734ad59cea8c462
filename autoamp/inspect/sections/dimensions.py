"""Sizes of matrix products that miss the multiples tensor cores work in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import NodeFacts
from autoamp.inspect.rows import Section
from autoamp.op_names import split_key
from autoamp.place.flops import flops_of

MULTIPLE = 8
"""Sizes of half-precision products should be multiples of 8: 16 bytes.

NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799), section 2.3: with
cuBLAS 11 and later tensor cores work for any size, most efficiently for multiples of 16
bytes.
"""


@dataclass(frozen=True)
class Misfit:
    """One size of one low matrix product or convolution.

    Attributes:
        graph, body: the section of the op.
        name: the name of the op's node.
        module: path of the module that calls the op.
        operand: the place of the operand, from 0.
        size: the size that is no multiple of `MULTIPLE`.
        next: the next multiple.
    """

    graph: int
    body: str
    name: str
    module: str
    operand: int
    size: int
    next: int


def misfits_of(sections: Sequence[Section]) -> list[Misfit]:
    """Sizes of low products on CUDA that miss the multiple, each once per module."""
    found: dict[tuple[str, int], Misfit] = {}
    for section in sections:
        for misfit in _in_section(section):
            found.setdefault((misfit.module or misfit.name, misfit.size), misfit)
    return list(found.values())


def _in_section(section: Section) -> Iterator[Misfit]:
    rewritten = section.rewritten
    for name, decision in rewritten.assignment.decisions.items():
        node, fact = section.before[name], rewritten.facts.nodes[name]
        if not decision.low or fact.device != "cuda" or not flops_of(node, fact):
            continue
        for operand, size in _sizes(node, fact):
            if size % MULTIPLE:
                above = size + MULTIPLE - size % MULTIPLE
                yield Misfit(
                    section.graph,
                    section.body,
                    name,
                    decision.module,
                    operand,
                    size,
                    above,
                )


def _sizes(node: fx.Node, fact: NodeFacts) -> Iterator[tuple[int, int]]:
    """The sizes of a product that matter, each with the place of its operand.

    These are the last two sizes of each matrix, and a convolution's channel counts.
    """
    _, name, _ = split_key(fact.op)
    for place, value in enumerate(node.args):
        tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            continue
        if "conv" not in name:
            yield from ((place, compat.hint(size)) for size in tensor.shape[-2:])
        elif place == 0:
            yield place, compat.hint(tensor.shape[1])
            yield 1, compat.hint(node.meta["val"].shape[1])
