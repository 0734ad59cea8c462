"""`python -m benchmarks.explain`: CPU time of `explain`, beside the capture itself.

The capture is `torch.compile(backend="eager")`'s first call, which captures the same
graphs and makes nothing of them.  `explain` is timed with its summary as text.  Both
run in one process on one thread, in turn; graphs are forgotten between.  Of a model of
seven billion parameters on the meta device, `explain` alone is timed, by the clock.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

import autoamp
from autoamp.inspect.report import Report

from . import report
from .capability import capability
from .pass_time import Chain

LIMIT, META_LIMIT = 1.3, 60.0
"""Times the capture; seconds for the model on meta."""


@dataclass(frozen=True)
class Found:
    """Median CPU seconds of one model, and the median ratio of the pairs."""

    name: str
    nodes: int
    capture: float
    explain: float
    ratio: float


def _gpt2(layers: int) -> nn.Module:
    special = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    shape = {"n_layer": layers, "n_embd": 64, "n_head": 4, "vocab_size": 200}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, **special))


def _llama_7b() -> nn.Module:
    config = hf.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config)


CASES: tuple[tuple[str, Callable[[], nn.Module], Callable[[], torch.Tensor]], ...] = (
    ("gpt2, 12 layers", lambda: _gpt2(12), lambda: torch.arange(16).view(2, 8)),
    ("gpt2, 52 layers", lambda: _gpt2(52), lambda: torch.arange(16).view(2, 8)),
    ("chain of 3000 ops", lambda: Chain(3000), lambda: torch.randn(4, 8)),
)


def _explained(model: nn.Module, given: torch.Tensor, **kwargs: Any) -> Report:
    options = {"precision": "bf16", "do_no_harm": False}
    made = autoamp.explain(model, given, options=options, **kwargs)
    str(made)
    return made


def _cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    torch._dynamo.reset()
    gc.collect()
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure(
    name: str,
    build: Callable[[], nn.Module],
    given: Callable[[], torch.Tensor],
    repeats: int,
) -> Found:
    """Medians of `repeats` pairs."""
    model, x = build(), given()
    model(x)
    pairs = []
    for _ in range(repeats):
        plain, _ = _cpu_seconds(lambda: torch.compile(model, backend="eager")(x))
        ours, made = _cpu_seconds(lambda: _explained(model, x))
        pairs.append((plain, ours))
    nodes = sum(len(each.before.graph.nodes) for each in made.rewritten)
    capture, explain = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(ours / plain for plain, ours in pairs)
    return Found(name, nodes, capture, explain, ratio)


def explain_on_meta() -> tuple[float, float, int]:
    """Seconds by the clock, billions of parameters and nodes of the model on meta."""
    model = _llama_7b()
    torch._dynamo.reset()
    start = time.perf_counter()
    made = _explained(
        model, torch.zeros(1, 2048, dtype=torch.long), device="cuda:sm_90"
    )
    taken = time.perf_counter() - start
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    nodes = sum(len(each.before.graph.nodes) for each in made.rewritten)
    return taken, billions, nodes


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes it; 1 if a limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explain")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measure("warm-up", lambda: _gpt2(1), lambda: torch.arange(16).view(2, 8), 1)
    chosen = [case for case in CASES if options.only in case[0]]
    found = [measure(*case, options.repeats) for case in chosen]
    header = ("explain of", "nodes", "capture s", "explain s", "ratio", "asked")
    rows = [
        (
            each.name,
            str(each.nodes),
            f"{each.capture:.2f}",
            f"{each.explain:.2f}",
            f"{each.ratio:.2f}",
            f"{LIMIT:.2f}",
        )
        for each in found
    ]
    taken, billions, nodes = explain_on_meta()
    on_meta = (
        f"Llama of {billions:.1f} billion parameters on meta, {nodes} nodes, for "
        f"cuda:sm_90: {taken:.1f} s (asked {META_LIMIT:.0f} s)."
    )
    text = "\n".join(
        [capability("cpu"), "", report.markdown(header, rows), "", on_meta]
    )
    print(text)
    if not options.only:
        data = {
            "capability": capability("cpu"),
            "cases": [asdict(each) for each in found],
            "meta": {"seconds": taken, "billions": billions, "nodes": nodes},
        }
        report.write(options.out / "explain", f"{text}\n", data)
    above = any(each.ratio > LIMIT for each in found)
    return int(above or taken > META_LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
