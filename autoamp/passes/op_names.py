"""Names of torch's ops, as rules files and users write them."""

from __future__ import annotations

import difflib
import functools

import torch

from autoamp import compat
from autoamp.compat import OpOverload

_OPS_PREFIX = "torch.ops."

_OPS = 4096
"""The ops whose names are kept at most: torch makes them anew each time."""


@functools.lru_cache(maxsize=_OPS)
def op_name(target: OpOverload) -> str:
    """The full name of `target`: `aten::sum.dim_IntList`, `aten::linear.default`."""
    schema = compat.schema(target)
    return f"{schema.name}.{schema.overload_name or 'default'}"


@functools.lru_cache(maxsize=_OPS)
def base_name(target: OpOverload) -> str:
    """The name of `target` without its overload: `aten::sum`."""
    name: str = compat.schema(target).name
    return name


def split_key(key: str) -> tuple[str, str, str]:
    """The namespace, name and overload (empty: all of them) of a canonical key."""
    namespace, _, rest = key.partition("::")
    name, _, overload = rest.partition(".")
    return namespace, name, overload


def parse_op_name(text: str) -> str:
    """The canonical key of an op as a user may spell it; the op need not exist.

    `linear`, `aten.linear`, `aten::linear` and `torch.ops.aten.linear` give
    `aten::linear`, which means every overload; `sum.dim_IntList`,
    `aten.sum.dim_IntList` and `aten::sum.dim_IntList` give the one overload.
    Two names joined by a dot are read as an overload of an ATen op if such an
    overload exists, or else as namespace and op if such an op exists.
    """
    text = text.strip().removeprefix(_OPS_PREFIX)
    if "::" in text:
        return text
    parts = text.split(".")
    if len(parts) == 1:
        return f"aten::{text}"
    if len(parts) > 2:
        return f"{parts[0]}::{parts[1]}.{'.'.join(parts[2:])}"
    overload, other = f"aten::{text}", f"{parts[0]}::{parts[1]}"
    if not exists(overload) and (exists(other) or parts[0] == "aten"):
        return other
    return overload


def overloads(key: str) -> list[OpOverload]:
    """Every overload the canonical `key` names in this torch; empty if none."""
    namespace, name, overload = split_key(key)
    if not (namespace.isidentifier() and name.isidentifier()):
        return []
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        names = [overload] if overload else packet.overloads()
        return [getattr(packet, each) for each in names]
    except (AttributeError, RuntimeError):
        return []


def exists(key: str) -> bool:
    """Whether this torch has the op, or the overload, that the key names."""
    return bool(overloads(key))


def close_names(key: str, limit: int = 3) -> list[str]:
    """Existing ops with names like `key`, the most similar first, for a message."""
    namespace, name, overload = split_key(key)
    if overload and (siblings := overloads(f"{namespace}::{name}")):
        names = [op_name(sibling) for sibling in siblings]
        return difflib.get_close_matches(key, names, limit, 0.0)
    wanted = [(namespace, name)]
    if overload:  # `sofmtax.int`, or an unknown namespace
        wanted.append(("aten", overload))
    for space, word in [*wanted, ("aten", name)]:
        close = difflib.get_close_matches(word, _known_names(space), 4 * limit)
        found = [f"{space}::{each}" for each in close if exists(f"{space}::{each}")]
        if found:
            return found[:limit]
    return []


def _known_names(namespace: str) -> list[str]:
    """Names that ops of `namespace` may have; torch has no public list of ATen ops."""
    names = set(dir(getattr(torch.ops, namespace, None)))
    if namespace == "aten":
        names.update(dir(torch), dir(torch.nn.functional), dir(torch.Tensor))
    return sorted(name for name in names if not name.endswith("_"))
