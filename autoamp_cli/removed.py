"""What was removed from the command line, and what to use instead of it."""

from __future__ import annotations

_ONE_DEVICE = "explain --device NAME predicts the time of a step on one device"

_OVERFLOW = "autoamp.find_overflow(model, x) finds the op on the live model"

COMMANDS = {
    "plan": "`autoamp explain NAME --device` predicts the time of a step",
    "replay": _OVERFLOW,
    "tune": "`autoamp bench NAME` times the ways to run a model",
}

_ONE_BATCH = "bench --batch N measures one batch size"

OPTIONS = {
    ("bench", "--grams-per-kwh"): "examples/power.py measures energy and CO2",
    ("bench", "--memory"): _ONE_BATCH,
    ("bench", "--plot"): "bench --json has the times",
    ("bench", "--sweep"): _ONE_BATCH,
    ("diff", "--html"): "`autoamp diff OLD NEW` prints what differs",
    ("explain", "--mesh"): _ONE_DEVICE,
    ("explain", "--node"): _ONE_DEVICE,
    ("explain", "--network"): _ONE_DEVICE,
    ("explain", "--microbatches"): _ONE_DEVICE,
    ("run", "--heal"): "the warning of skipped steps names the rule to convert with",
    ("run", "--lock"): "`autoamp diff OLD NEW --exit-code` compares two reports",
    ("run", "--record"): _OVERFLOW,
}
"""Options of commands that are still there."""
