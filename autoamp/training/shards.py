"""Weights that FSDP2 shards: gathered in the low dtype if graphs read only that dtype.

FSDP gathers a module's parameters before its forward, frees them after it, and gathers
them again for the backward.  A weight that all graphs read through its low copy may as
well be gathered in the low dtype, at half the traffic: the numbers that the graphs read
are the same to the bit.  The gathered tensor then *is* the copy: no graph casts, and no
graph keeps a copy until its backward, since FSDP frees that memory and gathers again.

Ranks must gather alike, but one rank may capture a graph that others do not.  So ranks
agree at calls 1, 2, 4, 8, ... of a model: a weight is gathered low once graphs on every
rank have read its low copy, and no graph on any rank has read the weight in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp_said import logger_of

logger = logger_of(__name__)


class Shard:
    """One sharded parameter, and how graphs on this rank have read it.

    Attributes:
        record: FSDP's object that holds the parameter; None once the model is gone.
        low: the dtype of the copies that graphs read; None before the first such graph.
        wide: whether some graph reads the parameter in fp32.
        is_low: whether the shards are gathered in `low`.
    """

    def __init__(self, group: Any, record: Any) -> None:
        self._group, self._record = weakref.ref(group), weakref.ref(record)
        self.low: torch.dtype | None = None
        self.wide = self.is_low = False

    @property
    def record(self) -> Any:
        return self._record()

    @property
    def may_be_low(self) -> bool:
        """Whether this rank agrees to gather the parameter in the low dtype."""
        if self.wide or self.low is None:
            return False
        return self.is_low or compat.may_gather_low(self._group(), self.record)

    def copy(
        self, weight: torch.Tensor, low: torch.dtype, layout: torch.memory_format
    ) -> torch.Tensor:
        """A copy of `weight`, the whole parameter, for one run of a graph."""
        # FSDP gathers a parameter in one dtype only.
        if self.low not in (None, low):
            self.wide = True  # graphs of two low dtypes
        self.low = low
        if self.is_low and not self.wide and layout == torch.preserve_format:
            return compat.gathered(self.record)
        # No copy is kept: FSDP frees the gathered weight after each forward and
        # backward.
        return weight.detach().to(low, memory_format=layout)

    def note_wide(self, weight: torch.Tensor) -> None:
        """Notes that a graph reads the whole parameter in fp32."""
        if self.is_low and not self.wide:
            logger.warning(
                "autoamp: a new graph reads a sharded weight of shape %s in fp32, but "
                "FSDP gathers the weight in %s. The graph reads rounded numbers until "
                "the ranks agree to gather the weight in fp32",
                tuple(weight.shape),
                short_name(weight.dtype if self.low is None else self.low),
            )
        self.wide = True


class _Model:
    """The shards of one model.

    Attributes:
        model: a weak reference to the model.
        shards: in the same order on all ranks.
        calls: how often the model has been called, which is equal on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.shards: list[Shard] = []
        self.calls = 0

    def agree(self, in_call: Callable[[], bool]) -> None:
        """Has the ranks agree which weights are gathered in the low dtype."""
        stepped = [shard.record.sharded_param for shard in self.shards]
        groups = {id(g): g for g in compat.shard_groups(stepped)}.values()
        may = [s.may_be_low for s in self.shards]
        # MIN over the ranks: a weight is gathered low only where every rank may.
        bits = torch.tensor(may, dtype=torch.uint8, device="cpu")
        for group in groups:
            bits = bits.to(compat.reached_on(group, stepped[0].device))
            torch.distributed.all_reduce(bits, torch.distributed.ReduceOp.MIN, group)
        for shard, low in zip(self.shards, bits.tolist(), strict=True):
            if low and not shard.is_low:
                assert shard.low is not None
                compat.gather_low(
                    shard.record, shard.low, in_call, compat.inside_backward
                )
            elif shard.is_low and not low:
                compat.gather_wide(shard.record)
            shard.is_low = bool(low)


class Sharded:
    """The sharded parameters of all converted models."""

    def __init__(self) -> None:
        self._by_whole: dict[int, Shard] = {}
        self._waiting: list[Shard] = []
        self._any = False
        # Keyed by the model's id, because a module may have no hash.
        self._models: dict[int, _Model] = {}

    def __bool__(self) -> bool:
        return self._any

    def of(self, weight: torch.Tensor) -> Shard | None:
        """The shard whose whole parameter is `weight`; None for any other tensor."""
        if id(weight) not in self._by_whole:
            # FSDP may have gathered some shards for the first time since.
            waiting, self._waiting = self._waiting, []
            for shard in waiting:
                whole = compat.whole_parameter(shard.record)
                if whole is not None:
                    self._by_whole[id(whole)] = shard
                elif shard.record:
                    self._waiting.append(shard)
        found = self._by_whole.get(id(weight))
        same = found is not None and compat.whole_parameter(found.record) is weight
        return found if same else None

    def note_wide(self, weights: Iterable[Any]) -> None:
        """Notes that a graph reads `weights` (tensors or sizes) themselves."""
        for weight in weights:
            shard = self.of(weight)
            if shard is not None:
                shard.note_wide(weight)

    def note_call(self, model: nn.Module, in_call: Callable[[], bool]) -> None:
        """Looks for shards, or has ranks agree, at calls 1, 2, 4, 8, ... of a model.

        Args:
            in_call: whether this thread is in a call of a converted model.
        """
        known = self._models.get(id(model))
        if known is None or known.model() is not model:
            known = self._models[id(model)] = _Model(model)
        known.calls += 1
        # Powers of two have one bit: ranks count the same calls, so that all of them
        # come to a collective or none does, and calls of a long training pay for none.
        if known.calls & (known.calls - 1):
            return
        if known.shards:
            with torch.inference_mode(False):  # tensors made here are saved in training
                known.agree(in_call)
            return
        pairs = compat.sharded_parameters(model)
        known.shards = [Shard(group, record) for group, record in pairs]
        self._waiting += known.shards
        self._any = self._any or bool(known.shards)

    def forget(self, model: nn.Module) -> None:
        """Has the shards of a model gathered as FSDP gathers them."""
        known = self._models.pop(id(model), None)
        for shard in known.shards if known and known.model() is model else ():
            self._by_whole.pop(id(compat.whole_parameter(shard.record)), None)
            if shard.is_low:
                compat.gather_wide(shard.record)


SHARDED = Sharded()
