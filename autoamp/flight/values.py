"""Nested values as JSON beside named tensors, so that a replay can build them again.

A value becomes one of

* `{"tensor": KEY, "requires_grad": BOOL, "device": TEXT}`: a tensor of the file;
* `{"batch": KEY}`: a tensor of `batch.safetensors`, met again in another file's values;
* `{"weight": NAME}`: a parameter or buffer of the model, by its name;
* `{"value": X}`: None, a bool, an int or a text; `{"float": TEXT}`: a float;
* `{"list": [...]}`, `{"tuple": [...]}`, `{"dict": [[KEY, VALUE], ...]}`;
* `{"object": CLASS, "fields": [[NAME, VALUE], ...]}`: a dataclass, a named tuple or a
  mapping of another class, such as a tokenizer's batch;
* `{"opaque": CLASS}`: anything else, or what is nested too deeply.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autoamp import compat

_DEEPEST = 6
_MOST = 4096
"""The most items of one container."""

_LOOKED_AT = 1024
"""How many numbers of a tensor its hash looks at."""


class Packed:
    """Tensors that are to be written to one file, each once.

    Attributes:
        tensors: copies in host memory, by the keys of the file.
        left_out: the keys of tensors that safetensors cannot hold, with the reason.
    """

    def __init__(
        self,
        prefix: str,
        weights: Mapping[int, str] | None = None,
        batch: Packed | None = None,
    ) -> None:
        """Makes a file without tensors.

        Args:
            prefix: what keys begin with.
            weights: the names of the model's tensors by their `id`.
            batch: the tensors that another file holds.
        """
        self.tensors: dict[str, torch.Tensor] = {}
        self.left_out: dict[str, str] = {}
        self._prefix, self._weights = prefix, weights or {}
        self._known: dict[int, tuple[torch.Tensor, str]] = {}
        self._batch = batch

    def pack(self, value: Any, depth: int = 0) -> dict[str, Any]:
        """`value` as JSON; its tensors are added."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or isinstance(value, bool | int | str):
            return {"value": value}
        if isinstance(value, float):
            return {"float": repr(value)}
        if depth < _DEEPEST:
            found = self._container(value, depth + 1)
            if found is not None:
                return found
        return {"opaque": class_of(value)}

    def _container(self, value: Any, depth: int) -> dict[str, Any] | None:
        for kind in (list, tuple):
            if type(value) is kind and len(value) <= _MOST:
                return {kind.__name__: [self.pack(each, depth) for each in value]}
        if type(value) is dict and len(value) <= _MOST:
            pairs = value.items()
            return {"dict": [[_key(k), self.pack(v, depth)] for k, v in pairs]}
        parts = parts_of(value)
        if parts is None or len(parts) > _MOST:
            return None
        fields = [[_key(k), self.pack(v, depth)] for k, v in parts.items()]
        return {"object": class_of(value), "fields": fields}

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        if id(value) in self._weights:
            return {"weight": self._weights[id(value)]}
        if self._batch is not None and id(value) in self._batch._known:
            return {"batch": self._batch._known[id(value)][1]}
        known = self._known.get(id(value))
        key = known[1] if known else f"{self._prefix}{len(self._known)}"
        if known is None:
            self._known[id(value)] = value, key  # keeps the id taken
            self.add(key, value)
        return {
            "tensor": key,
            "requires_grad": value.requires_grad,
            "device": str(value.device),
        }

    def add(self, key: str, value: torch.Tensor) -> None:
        """Adds a copy of a tensor by a key of its own."""
        part = compat.local_part(value.detach())
        if part.layout is not torch.strided or part.is_meta or part.is_complex():
            kind = "meta" if part.is_meta else f"{part.layout}, {part.dtype}"
            self.left_out[key] = kind
            return
        # One copy: safetensors refuses memory that two tensors share.
        copy = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        self.tensors[key] = copy.copy_(part)


def parts_of(value: Any) -> dict[Any, Any] | None:
    """The parts of a dataclass, named tuple or mapping by name, or None."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: getattr(value, name, None) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=False))
    return None


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth >= _DEEPEST or value is None or isinstance(value, str | bytes):
        return
    if type(value) in (list, tuple):
        inside = value
    else:
        parts = parts_of(value)
        if parts is None:
            return
        inside = [*parts.values()]
    if len(inside) <= _MOST:
        for each in inside:
            yield from tensors_in(each, depth + 1)


def held(value: Any, depth: int = 0) -> Any:
    """`value` with tensors that keep no graph of autograd alive."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_() if value.grad_fn is not None else value
    if depth >= _DEEPEST:
        return value
    if type(value) in (list, tuple):
        return type(value)([held(each, depth + 1) for each in value])
    if type(value) is dict:
        return {key: held(each, depth + 1) for key, each in value.items()}
    return value


def class_of(value: object) -> str:
    """The full name of the class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _key(key: Any) -> Any:
    return key if isinstance(key, str | int) else repr(key)


# -- the hash of a batch ---------------------------------------------------------------


def sums_of(tensors: list[torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
    """What a hash of a batch is made of: shapes and dtypes, and two sums of each.

    The sums are of at most `_LOOKED_AT` numbers of a tensor, at even distances; nothing
    waits for a device.
    """
    kinds, sums = [], []
    with torch.no_grad():
        for each in tensors:
            kinds.append(f"{tuple(each.shape)} {each.dtype}")
            part = _some(compat.local_part(each.detach()))
            if part is not None:
                kind = torch.float64 if part.is_floating_point() else torch.int64
                half = part[: len(part) // 2]
                sums += [part.sum(dtype=kind), half.sum(dtype=kind)]
    return ";".join(kinds), sums


def hash_of(kinds: str, numbers: list[float]) -> str:
    """Eight hexadecimal digits, the same for the same numbers in every process."""
    text = f"{kinds}|{','.join(map(repr, numbers))}"
    return f"{zlib.crc32(text.encode()):08x}"


def _some(tensor: torch.Tensor) -> torch.Tensor | None:
    """Some numbers of a tensor in one dimension, without a copy of all of it."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_complex():
        return None
    while not tensor.is_contiguous() and tensor.ndim > 1 and tensor.shape[0]:
        tensor = tensor[tensor.shape[0] // 2]
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // _LOOKED_AT)]
