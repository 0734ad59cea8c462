"""Figures from the report of a converted model that explain the measured times."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from autoamp.benchmark.record import Evidence
from autoamp.benchmark.step.running import device_of as device_with
from autoamp.benchmark.step.ways import Way, arrived
from autoamp.inspect.figures import OpTime
from autoamp.inspect.findings import is_users_choice
from autoamp.inspect.report import Report
from autoamp.model.reporting import report_on
from autoamp.place.devices import Device, device_of
from autoamp.saved.rows import OpRow


def evidence_of(way: Way, model: nn.Module) -> Evidence:
    """The evidence of a model that runs `way`, after it has run.

    Args:
        model: the converted copy.
    """
    device = device_of(device_with(model), way.low)
    report = report_on(model)
    if report is None:
        return Evidence(device.pays, device.name, arrived(model))
    return evidence_from(report, device, arrived(model))


def evidence_from(report: Report, device: Device, half: str = "") -> Evidence:
    """The evidence that a report gives.

    Args:
        device: the device that the model runs on, or for which it was explained.
        half: the half dtype in which the weights arrived, or "".
    """
    rows = report.ops
    times = report.prediction
    timed = {op.row.key: op for op in times.ops} if times else {}
    total = times.seconds(placed=False) if times else 0.0
    high = [row for row in rows if not row.is_low]
    ruled = [row for row in high if is_users_choice(report.section_of(row), row)]
    shares = times.shares(placed=False) if times else {}
    odd, flops = times.odd_product(report.misfits) if times else (None, 0.0)
    return Evidence(
        pays=device.pays,
        units=device.name,
        arrived=half,
        float_ops=len(rows),
        low_ops=len(rows) - len(high),
        ruled=_share(ruled, timed, total) if timed else _part(ruled, rows),
        ruled_by=_costliest(ruled, timed),
        stayed=_share(high, timed, total) if timed else None,
        stayed_because=_costliest(high, timed),
        launches=shares.get("launches"),
        memory=shares.get("memory"),
        arithmetic=shares.get("arithmetic"),
        speed_up=report.headline.speed_up,
        odd_flops=flops,
        odd_size=odd.size if odd else 0,
        odd_next=odd.next if odd else 0,
        odd_module=(odd.module or odd.name) if odd else "",
    )


_Key = tuple[int, str, str]


def _key(row: OpRow) -> _Key:
    return row.graph, row.body, row.name


def _share(rows: Sequence[OpRow], timed: dict[_Key, OpTime], total: float) -> float:
    seconds = sum(timed[_key(row)].high.nanoseconds for row in rows) * 1e-9
    return seconds / total if total else 0.0


def _part(rows: Sequence[OpRow], every: Sequence[OpRow]) -> float:
    return len(rows) / len(every) if every else 0.0


def _costliest(rows: Sequence[OpRow], timed: dict[_Key, OpTime]) -> str:
    """The reason of the op that takes most time; without times, that moves most."""
    if not rows:
        return ""

    def weight(row: OpRow) -> tuple[float, int]:
        op = timed.get(_key(row))
        return op.high.nanoseconds if op else 0.0, row.bytes

    return max(rows, key=weight).heading
