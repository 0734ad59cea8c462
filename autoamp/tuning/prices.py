"""Prices of ops and casts that were measured on the device at hand."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.classified import Classified
from autoamp.ask.progress import told
from autoamp.calibrate.store import Store
from autoamp.dtypes import HIGH_DTYPE
from autoamp.place.cost import UNIT_NS, Prices, price_graph
from autoamp.place.devices import device_of, main_device
from autoamp.tuning.specimen import Specimen, cast_specimen, op_specimen

logger = logging.getLogger(__name__)

Wanted = Mapping[tuple[str, str], Specimen]
"""("high", "low", "down" or "up", the node's name) to the specimen to be measured."""


@dataclass(eq=False)
class MeasuredPrices:
    """A `PriceModel` whose prices are measured, on operands like the graph's.

    An op that cannot be called by itself gets the roofline's price, multiplied by the
    mean ratio of measured prices to the roofline's prices in the same precision.

    Attributes:
        low: the compute dtype.
        store: the times measured so far.
        measures: whether unknown times are measured; if not, they are estimated.
        measured, remembered: how many times were measured, and found in the store.
    """

    low: torch.dtype
    store: Store
    measures: bool = True
    measured: int = 0
    remembered: int = 0
    _met: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(
        self,
        gm: fx.GraphModule,
        classified: Classified,
        *,
        objective: str,
        do_no_harm: bool,
        free_weights: bool,
    ) -> Prices:
        """The prices of a graph; no op has a reward, because its gain is measured.

        Args:
            gm, classified, free_weights: as for `price_graph`.
            objective: "time".
            do_no_harm: ignored.
        """
        del do_no_harm
        device = main_device(gm)
        roofline = price_graph(
            gm,
            classified,
            device_of(device, self.low),
            objective=objective,
            do_no_harm=True,
            free_weights=free_weights,
        )
        wanted = self._wanted(gm, classified, roofline)
        with self._lock:
            if self.measures:
                self._measure(wanted.values(), device)
            found = {
                at: self.store.known[each.key] / UNIT_NS
                for at, each in wanted.items()
                if each.key in self.store.known
            }
        return _replaced(roofline, found)

    def _wanted(
        self, gm: fx.GraphModule, classified: Classified, roofline: Prices
    ) -> dict[tuple[str, str], Specimen]:
        """The ops and casts of a graph that have a price."""
        found: dict[tuple[str, str], Specimen] = {}
        for node in gm.graph.nodes:
            name = node.name
            if any(roofline.ops.get(name, ())):
                for side, low in (("high", None), ("low", self.low)):
                    specimen = op_specimen(node, classified, low)
                    if specimen is not None:
                        found[side, name] = specimen
            for side, dtypes in _CASTS.items():
                casts = roofline.down if side == "down" else roofline.up
                if not casts.get(name) or (side == "up" and node.op == "placeholder"):
                    continue  # a weight with a kept copy, or an input, which is fp32
                before, after = (d or self.low for d in dtypes)
                grad = classified.facts.nodes[name].requires_grad
                value = node.meta["val"]
                found[side, name] = cast_specimen(value, before, after, grad=grad)
        return found

    def _measure(self, specimens: Iterable[Specimen], device: torch.device) -> None:
        """Measures the unknown times, and stores them."""
        every = {each.key: each for each in specimens}
        new = {k: v for k, v in every.items() if k not in self._met}
        self._met.update(new)
        missing = {k: v for k, v in new.items() if k not in self.store.known}
        self.remembered += len(new) - len(missing)
        found = {}
        with _measuring(device):
            for key, specimen in told(missing.items(), "measuring ops and casts"):
                try:
                    found[key] = specimen.nanoseconds(device)
                except Exception as error:  # noqa: BLE001 (an op may refuse zeros)
                    logger.debug("autoamp: %s is not measured: %s", key, error)
        self.measured += len(found)
        self.store.add(found)


_CASTS = {"down": (HIGH_DTYPE, None), "up": (None, HIGH_DTYPE)}
"""The dtypes before and after a cast; None is the compute dtype."""


@contextlib.contextmanager
def _measuring(device: torch.device) -> Iterator[None]:
    """A region for timing ops: modes are off, and random generators are restored."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), compat.on_real_numbers():
        yield


def _replaced(roofline: Prices, found: Mapping[tuple[str, str], float]) -> Prices:
    """A roofline's prices, each replaced by a measured price or scaled to fit them."""
    tables = {
        "high": {name: pair[0] for name, pair in roofline.ops.items()},
        "low": {name: pair[1] for name, pair in roofline.ops.items()},
        "down": roofline.down,
        "up": roofline.up,
    }
    off = defaultdict[str, list[float]](list)
    for (side, name), measured in found.items():
        if tables[side].get(name):
            off[side].append(math.log(measured / tables[side][name]))

    def price(side: str, name: str) -> int:
        before = tables[side][name]
        if not before:
            return 0  # a view, or a weight whose copy is kept
        known = found.get((side, name))
        if known is None:
            logs = off[side]
            known = before * math.exp(sum(logs) / len(logs)) if logs else before
        return max(1, round(known))

    ops = {}
    for name, (high, low) in roofline.ops.items():
        ops[name] = price("high", name), price("low", name)
        if high == low:  # the call is the same with either label
            ops[name] = (ops[name][0],) * 2
    return replace(
        roofline,
        ops=ops,
        down={name: price("down", name) for name in roofline.down},
        up={name: price("up", name) for name in roofline.up},
        device=replace(roofline.device, name=f"{roofline.device.name}, measured"),
    )
