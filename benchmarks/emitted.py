"""What the pass emits, as one hash: for changes that must not change it.

    python -m benchmarks.emitted before.json    on the commit before
    python -m benchmarks.emitted after.json --against before.json

Hashed are the code of every graph that is run, and the reason of every decision: of
the models of tests/models and tests/zoo in training (bf16 and fp16), and of random
graphs under one seed.  Prices depend on the processor: compare runs of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from rich.progress import track
from torch import fx

import autoamp
from autoamp.passes.graph_record import Rewritten, Setting
from autoamp.passes.run import rewrite_normalised
from autoamp.training.options import Options
from tests.conformance.graphs import Recipe
from tests.conformance.moves import MOVES
from tests.models import BY_NAME as MODELS
from tests.models.case import Case
from tests.zoo import BY_NAME as ZOO

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
CHECKOUT = Path(__file__).resolve().parent.parent
STEPS = 60
"""Steps of a random graph, at most; each is a node or a few."""


def code_of(gm: fx.GraphModule) -> str:
    """The code of a graph and of the graphs in it; our functions by name alone.

    In the code they are called by the names of their modules too.
    """
    inner = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    code = "\n".join(each.code for each in inner)
    return re.sub(
        r"\bautoamp_(graph_functions|kernels_functions|passes_functions)_[a-z]+_",
        "autoamp_",
        code,
    )


def reasons_of(rewritten: Iterable[Rewritten]) -> str:
    """Every decision with its reason, bodies included."""
    return "\n".join(
        f"{name} {decision.low} {decision.reason}"
        for one in rewritten
        for each in one.with_bodies()
        for name, decision in each.assignment.decisions.items()
    )


def of_model(case: Case, precision: str) -> str:
    """The hash of the graphs that one training step of a model runs."""
    torch._dynamo.reset()
    model = autoamp.convert(case.model(), precision=precision, do_no_harm=False)
    args, kwargs = case.inputs(0)
    case.loss(model(*args, **kwargs)).backward()
    report = autoamp.report(model)
    text = "\n".join(map(code_of, report.graphs))
    skipped = "\n".join(map(" ".join, report.skipped)).replace(str(CHECKOUT), "")
    return digest(text, reasons_of(report.rewritten), skipped)


def of_random_graph(seed: int) -> str:
    """The hash of a random graph, rewritten."""
    draw = random.Random(seed)
    names = list(MOVES)
    steps = []
    for _ in range(draw.randint(1, STEPS)):
        name = draw.choice(names)
        operands = tuple(draw.randint(0, 40) for _ in MOVES[name].kinds)
        steps.append((name, draw.randint(0, 41), operands))
    outputs = tuple(draw.randint(0, 40) for _ in range(draw.randint(1, 4)))
    built = Recipe(tuple(steps), outputs, draw.random() < 0.75).build(MOVES)
    low = LOW[draw.choice([*LOW])]
    options = Options(do_no_harm=draw.random() < 0.3)
    found = rewrite_normalised(built.normalised(), options, low, Setting(True), {})
    return digest(code_of(found.gm), reasons_of([found]))


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def hashes(models: Mapping[str, Case], graphs: int) -> dict[str, str]:
    found = {}
    jobs = [(name, precision) for name in models for precision in LOW]
    for name, precision in track(jobs, "models", disable=not sys.stderr.isatty()):
        try:
            found[f"{name} {precision}"] = of_model(models[name], precision)
        except Exception as error:  # noqa: BLE001 (that it fails is what it emits)
            found[f"{name} {precision}"] = type(error).__name__
    for seed in track(range(graphs), "graphs", disable=not sys.stderr.isatty()):
        found[f"graph {seed}"] = of_random_graph(seed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="where to write the hashes, as JSON")
    parser.add_argument("--against", type=Path, help="hashes that must be the same")
    parser.add_argument("--graphs", type=int, default=1000, help="random graphs")
    parser.add_argument("--only", nargs="*", help="models (default: all)")
    args = parser.parse_args()
    every = {**MODELS, **{f"zoo/{name}": case for name, case in ZOO.items()}}
    wanted = every if args.only is None else {n: every[n] for n in args.only}
    found = hashes(wanted, args.graphs)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(len(found), "hashes, together", digest(*found.values()))
    if args.against is None:
        return 0
    before = json.loads(args.against.read_text())
    changed = [name for name in found if found[name] != before.get(name)]
    print(len(changed), "differ:", *changed[:20])
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
