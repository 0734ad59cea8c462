"""The figures by which ops are priced: measured on this machine, or a table's.

Figures are measured once for a device, a number of threads and a version of torch, and
kept on disk.  Of several ranks the first measures, and the others take its figures, so
that all place ops alike.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from autoamp import compat
from autoamp.calibrate.hardware import described, device_name
from autoamp.calibrate.measure import SECONDS, NoTimeError, measured
from autoamp.calibrate.speeds import Times, device_from, is_sane
from autoamp.calibrate.store import append, lines_of, path_for
from autoamp.dtypes import short_name
from autoamp.messages import advice, log_once
from autoamp.place.devices import Device, device_of
from autoamp.printable import printable_line

logger = logging.getLogger(__name__)

SWITCH = "AUTOAMP_CALIBRATE"
"""The environment variable that switches measuring off."""

OFF = ("0", "false", "off")

_LONGEST_LINE = 10_000
"""The most characters of a line of a file: the times of all probes take 2,500."""

_AT_LEISURE = 10.0
"""Seconds for a measurement that a user has asked for."""

_PATIENCE = 10.0
"""Seconds that a rank waits for the figures of the first rank: longer than measuring
takes, and than ranks are apart at their first calls as a rule."""


@dataclass(frozen=True)
class _Found:
    """Measured times, or why there are none.

    Attributes:
        times: the times of all probes; None where a table's figures are used.
        why_not: why there are no times; "" where there are.
    """

    times: Times | None
    why_not: str = ""


_known: dict[tuple[str, torch.dtype, bool], Device] = {}
_measuring = threading.Lock()


def device_for(device: torch.device, low: torch.dtype, *, calibrate: bool) -> Device:
    """The speeds of `device`, of this machine, computing in `low`.

    Args:
        calibrate: whether the figures may be measured ones.
    """
    table = device_of(device, low)
    if is_off() or not (calibrate and table.pays and _is_here(device)):
        return table
    key = described(device), low, compat.are_several()
    with _measuring:
        if key not in _known:
            found = _shared(device, low) if compat.are_several() else _own(device, low)
            _known[key] = _device(found, device, low, table)
    return _known[key]


def measure_again(device: torch.device, low: torch.dtype) -> Device:
    """Measures the speeds of a device anew, at leisure, and keeps them.

    Raises:
        OSError: the file that holds the speeds kept so far cannot be deleted.
    """
    with _measuring:
        path_for(_kept_as(device)).unlink(missing_ok=True)
        _known.clear()
        found = _own(device, low, _AT_LEISURE)
    return _device(found, device, low, device_of(device, low))


def is_off() -> bool:
    """Whether `AUTOAMP_CALIBRATE` switches measuring off."""
    return os.environ.get(SWITCH, "").strip().lower() in OFF


def _is_here(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and not compat.is_capturing(device)
    return device.type == "cpu"


def _device(
    found: _Found, device: torch.device, low: torch.dtype, table: Device
) -> Device:
    if found.times is None:
        return replace(table, name=f"{table.name} by a table, as {found.why_not}")
    name = f"{_spoken(device)}, measured"
    return device_from(found.times, low, table, name)


def _spoken(device: torch.device) -> str:
    """The device's name inside a sentence."""
    return " ".join(device_name(device).split())


def _kept_as(device: torch.device) -> str:
    return f"speeds, {described(device)}"


def _own(device: torch.device, low: torch.dtype, seconds: float = SECONDS) -> _Found:
    """The figures kept on disk, or measured now within `seconds`."""
    path, dtype = path_for(_kept_as(device)), short_name(low)

    def kept() -> Times | None:
        for line in lines_of(path, _LONGEST_LINE):
            match line:
                case [str(of), dict() as times] if of == dtype and is_sane(times, low):
                    return times
        return None

    times = kept()
    if times is not None:
        return _Found(times)
    begun = time.perf_counter()
    try:
        times = measured(device, low, seconds)
    except NoTimeError:
        return _given_up(device, f"it was too busy to be measured in {seconds:g} s")
    except Exception as error:  # noqa: BLE001 (a device that fails has a table)
        problem = printable_line(f"{type(error).__name__}: {error}", 200)
        return _given_up(device, f"measuring failed ({problem})")
    append(path, json.dumps([dtype, {k: round(ns) for k, ns in times.items()}]) + "\n")
    logger.info(
        "autoamp: measured the speeds of %s in %.1f s, once: they are kept in %s "
        "(%s takes the figures of a table)",
        _spoken(device),
        time.perf_counter() - begun,
        path,
        advice("calibrate", False, by_variables=True),
    )
    # Of two processes that have measured at once, both take what was written first.
    return _Found(kept() or times)


def _given_up(device: torch.device, why: str) -> _Found:
    text = f"autoamp: the speeds of {_spoken(device)} are those of a table: {why}"
    log_once(logger, logging.INFO, text)
    return _Found(None, why)


def _shared(device: torch.device, low: torch.dtype) -> _Found:
    """The figures of the first rank, or of the rank that was first to have figures."""
    store = compat.default_store()
    if store is None:
        return _Found(None, "ranks cannot tell each other their speeds")
    key = f"autoamp/speeds/{device.type}/{short_name(low)}"
    try:
        if torch.distributed.get_rank() == 0 or not _is_set(store, key):
            mine = _own(device, low)
            said = json.dumps([mine.times, mine.why_not])
            if store.add(f"{key}/turns", 1) == 1:
                store.set(key, said)
        store.wait([key], timedelta(seconds=_PATIENCE))
        return _read(store.get(key), low)
    except Exception as error:  # noqa: BLE001 (a rank that is alone has a table)
        problem = printable_line(f"{type(error).__name__}: {error}", 200)
        return _given_up(device, f"the ranks cannot tell each other ({problem})")


def _is_set(store: Any, key: str) -> bool:
    """Whether the first rank sets a key in time."""
    until = time.monotonic() + min(_PATIENCE, store.timeout.total_seconds() / 2)
    while time.monotonic() < until:
        if store.check([key]):
            return True
        time.sleep(0.01)
    return False


def _read(said: bytes, low: torch.dtype) -> _Found:
    match json.loads(said):
        case [dict() as times, ""] if is_sane(times, low):
            return _Found(times)
        case [_, str(why)]:
            return _Found(None, why or "the first rank has no figures")
    return _Found(None, "the first rank has no figures")
