"""`python -m benchmarks.inference`: GPT-2 at batch 1, without gradients.

Every way of running the model in turn, under `torch.no_grad` and
`torch.inference_mode`.  Asked of autoamp on a CPU: twice as fast as `torch.autocast`
at lengths 1 to 32, and no more than a tenth slower than `model.bfloat16()`; on a GPU:
never slower than `torch.autocast`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.progress import track
from torch import nn

from tests.models.case import Args, Case, tokens

from . import report
from .metrics import to_device
from .models import QUICK_VOCAB, full_case
from .report import Data, commit
from .setting import Setting, add_arguments, capability, setting_of
from .step_times import interleaved, ratios
from .ways import Prepared, low_way, prepared

ASKED = {"cpu": (2.0, 1.1), "cuda": (1.0, math.inf)}
"""How many times as fast as autocast autoamp is to be, and how many times the time of
the model in 16 bits it may take, for lengths up to `ASKED_LENGTH`."""
ASKED_LENGTH = 32

BASELINE, AUTOCAST, LOW = "fp32", "autocast", "model in 16 bits"
OURS = ("autoamp", "autoamp, do_no_harm=False")
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
HEADER = (
    *("mode, length", "peer", "ms", "time / fp32", "autocast's time / this"),
    *("time / 16 bits", "weights refreshed"),
)


def cases(quick: bool) -> dict[int, Case]:
    """GPT-2 with one text of each length; a small model and few lengths if `quick`."""
    vocab = QUICK_VOCAB if quick else 50257

    def text(length: int, seed: int) -> Args:
        return (), {"input_ids": tokens(seed, 1, length, vocab=vocab)}

    lengths = (1, 32) if quick else (1, 8, 32, 128)
    return {n: full_case("gpt2", partial(text, n), quick) for n in lengths}


def calls(case: Case, setting: Setting) -> dict[str, Prepared]:
    """The model run as each peer does, in eval mode."""
    ways = {
        BASELINE: ("fp32", {}),
        AUTOCAST: ("autocast", {}),
        LOW: (low_way(setting), {}),
        OURS[0]: ("autoamp", {"do_no_harm": True}),
        OURS[1]: ("autoamp", {}),
    }
    found = {}
    for name, (way, options) in ways.items():
        torch.manual_seed(0)
        found[name] = prepared(case, way, setting, **options)
        found[name].model.eval()
    return found


def refreshed(model: nn.Module) -> int:
    """Weight copies made equal to their weights so far, in all graphs of a model."""
    from autoamp.runtime.conversion import conversion_of

    state = conversion_of(model)
    graphs = state.engine.record.graphs if state is not None and state.engine else []
    return sum(g.copies.refreshed for g in graphs if g.copies is not None)


def measured(peers: dict[str, Prepared], case: Case, rounds: int, device: str) -> Data:
    """Figures of each peer on one batch, in the grad mode that is on."""
    batch = to_device(case.inputs(0), device)
    steps = {name: peer._replace(batch=batch).forward for name, peer in peers.items()}
    for step in steps.values():
        step()
        step()
    before = {name: refreshed(peer.model) for name, peer in peers.items()}
    taken = interleaved(steps, rounds, device)
    fp32, low = ratios(taken, BASELINE), ratios(taken, LOW)
    return {
        name: {
            "seconds": times,
            "time_over_fp32": fp32[name],
            "autocast_over_time": statistics.median(
                a / t for a, t in zip(taken[AUTOCAST], times, strict=True)
            ),
            "time_over_low": low[name],
            "weights_refreshed": refreshed(peers[name].model) - before[name],
        }
        for name, times in taken.items()
    }


def row(case: str, name: str, got: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        case,
        name,
        f"{1e3 * statistics.median(got['seconds']):.1f}",
        f"{got['time_over_fp32']:.2f}",
        f"{got['autocast_over_time']:.2f}",
        f"{got['time_over_low']:.2f}",
        str(got["weights_refreshed"]) if name in OURS else "",
    ]


def verdict(results: list[Data], device: str) -> tuple[bool, str]:
    """Whether autoamp reaches what is asked, and a line that says how far it is."""
    asked = [
        got
        for result in results
        if result["length"] <= ASKED_LENGTH
        for name, got in result["peers"].items()
        if name == OURS[0]
    ]
    if not asked:
        return True, "no length was measured of which a figure is asked"
    least = min(got["autocast_over_time"] for got in asked)
    most = max(got["time_over_low"] for got in asked)
    faster, slower = ASKED[device]
    good = least >= faster and most <= slower
    asked_low = "" if slower == math.inf else f" (asked {slower})"
    return good, (
        f"lengths up to {ASKED_LENGTH}: at least {least:.2f} times as fast as autocast "
        f"(asked {faster}), at most {most:.2f} of the time of the {LOW}{asked_low}: "
        + ("reached" if good else "not reached")
    )


def measure(setting: Setting, rounds: int) -> Data:
    """The figures of every length in both modes."""
    wanted = cases(setting.quick)
    peers = calls(next(iter(wanted.values())), setting)
    results = []
    for mode, context in MODES.items():
        for length, case in track(wanted.items(), mode, transient=True):
            with context():
                found = measured(peers, case, rounds, setting.device)
            results.append({"mode": mode, "length": length, "peers": found})
    size = ", a small model" if setting.quick else ""
    note = (
        f"transformers {hf.__version__}; GPT-2, batch 1, {setting.precision}{size}; "
        f"median of {rounds} interleaved rounds"
    )
    head = {"capability": capability(setting.device), "commit": commit(), "note": note}
    return {**head, "device": setting.device, "results": results}


def text(data: Data) -> str:
    """The page."""
    lines = [
        row(f"{each['mode']}, {each['length']}", name, got)
        for each in data["results"]
        for name, got in each["peers"].items()
    ]
    _, told = verdict(data["results"], data["device"])
    return report.page(data, report.markdown(HEADER, lines), told)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the page and writes it; 1 if what is asked is not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference")
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds")
    given = parser.parse_args(arguments)
    setting = setting_of(parser, given)
    data = measure(setting, given.rounds)
    page = text(data)
    report.write(given.out / setting.stem("inference"), page, data)
    print(page)
    return int(not verdict(data["results"], setting.device)[0])


if __name__ == "__main__":
    raise SystemExit(main())
