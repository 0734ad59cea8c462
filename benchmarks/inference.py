"""`python -m benchmarks.inference`: GPT-2 at batch 1, without gradients.

Every way of running the model in turn, under `torch.no_grad` and
`torch.inference_mode`.  Asked of autoamp on a CPU: twice as fast as `torch.autocast`
at lengths 1 to 32, and no more than a tenth slower than `model.bfloat16()`; on a GPU:
never slower than `torch.autocast`.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.progress import Progress
from torch import Tensor, nn

from . import report
from .peers import BASELINE
from .setting import Setting, add_arguments, setting_of
from .timing import interleaved, ratios
from .workloads import Workload, workloads

ASKED = {"cpu": (2.0, 1.1), "cuda": (1.0, math.inf)}
"""How many times as fast as autocast autoamp is to be, and how many times the time of
the model in 16 bits it may take, for lengths up to `ASKED_LENGTH`."""
ASKED_LENGTH = 32

AUTOCAST, LOW = "autocast", "model in 16 bits"
OURS = ("autoamp", "autoamp, do_no_harm=False")
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
HEADER = (
    "mode, length",
    "peer",
    "ms",
    "time / fp32",
    "autocast's time / this",
    "time / 16 bits",
    "weights refreshed",
)

Call = Callable[[Tensor], Any]


def calls(original: nn.Module, setting: Setting) -> dict[str, tuple[Call, nn.Module]]:
    """Each peer: what is called with token ids, and the model under it."""
    import autoamp

    def plain(model: nn.Module) -> tuple[Call, nn.Module]:
        return lambda ids: model(input_ids=ids), model

    def under_autocast(ids: Tensor) -> Any:
        with torch.autocast(setting.device, setting.low):
            return original(input_ids=ids)

    def converted(do_no_harm: bool) -> nn.Module:
        model: nn.Module = autoamp.convert(
            copy.deepcopy(original),
            precision=setting.precision,
            do_no_harm=do_no_harm,
            strict=True,
        )
        return model

    return {
        BASELINE: plain(original),
        AUTOCAST: (under_autocast, original),
        LOW: plain(copy.deepcopy(original).to(setting.low)),
        OURS[0]: plain(converted(do_no_harm=True)),
        OURS[1]: plain(converted(do_no_harm=False)),
    }


def refreshed(model: nn.Module) -> int:
    """Weight copies made equal to their weights so far, in all graphs of a model."""
    from autoamp.model.conversion import conversion_of

    state = conversion_of(model)
    graphs = state.engine.record.graphs if state is not None and state.engine else []
    return sum(g.copies.refreshed for g in graphs if g.copies is not None)


def measure(
    peers: dict[str, tuple[Call, nn.Module]],
    workload: Workload,
    rounds: int,
    device: str,
) -> dict[str, dict[str, Any]]:
    """Figures of each peer on one batch, in the grad mode that is on."""
    ids: Tensor = workload.batch()[1]["input_ids"].to(device)
    for call, _ in peers.values():
        for _ in range(2):
            call(ids)
    before = {name: refreshed(model) for name, (_, model) in peers.items()}
    taken = interleaved(
        {name: lambda call=call: call(ids) for name, (call, _) in peers.items()},
        rounds,
        device,
    )
    fp32, low = ratios(taken, BASELINE), ratios(taken, LOW)
    return {
        name: {
            "seconds": times,
            "time_over_fp32": fp32[name],
            "autocast_over_time": statistics.median(
                a / t for a, t in zip(taken[AUTOCAST], times, strict=True)
            ),
            "time_over_low": low[name],
            "weights_refreshed": refreshed(peers[name][1]) - before[name],
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


def verdict(results: Sequence[dict[str, Any]], device: str) -> tuple[bool, str]:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes it; 1 if what is asked is not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference")
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    setting = setting_of(parser, options)
    torch.manual_seed(0)
    chosen = [w for w in workloads(options.quick) if w.name.startswith("gpt2 batch 1 ")]
    peers = calls(chosen[0].build().to(setting.device).eval(), setting)
    results: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(chosen) * len(MODES))
        for mode, context in MODES.items():
            for workload in chosen:
                length = workload.batch()[1]["input_ids"].shape[1]
                case = f"{mode}, {length}"
                progress.update(task, description=case)
                with context():
                    found = measure(peers, workload, options.rounds, setting.device)
                results.append({"mode": mode, "length": length, "peers": found})
                lines += [row(case, name, got) for name, got in found.items()]
                progress.advance(task)
    good, says = verdict(results, setting.device)
    line = f"{setting.capability}, transformers {hf.__version__}"
    size = ", a small model" if options.quick else ""
    note = (
        f"{line}; GPT-2, batch 1, {setting.precision}{size}; "
        f"median of {options.rounds} interleaved rounds"
    )
    text = "\n".join([note, "", report.markdown(HEADER, lines), "", says]) + "\n"
    data = {"capability": line, "rounds": options.rounds, "results": results}
    report.write(options.out / setting.stem("inference"), text, data)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
