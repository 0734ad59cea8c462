"""Serve a compiled model without autoamp: torch alone, in a process of its own.

A small BERT is exported three times: in fp32, with a region of `torch.autocast` in its
forward, and converted by autoamp.  AOTInductor compiles each to a package, and another
process answers requests from each.  That process loads the packages with torch alone.

    python examples/served.py

The region has to be in the forward: `torch.export` leaves out a region around it.

The exit status is 1 unless
- the exported program of the converted model answers as the model does, bit for bit;
- the package's answers are as near to the program's as roundings left out explain (see
  `Served.bound`);
- the package is at most 0.65 of fp32's, and no serving process imported autoamp.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OPTIONS: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
"""`do_no_harm=False` converts on any machine, even where bf16 cannot pay."""

SMALLER = 0.65
"""The share of fp32's file that the package may have; all weights low would be 0.5."""

REQUESTS = "requests.pt"


# -- the process that serves: torch and packages, nothing else -------------------------


def resident() -> int:
    """The bytes of memory that this process holds; 0 where the system is not Linux."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def serve(folder: Path, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """The answers of packages to the same requests, memory and milliseconds of a call.

    The packages take turns, so that other work on the machine slows all of them.
    """
    from torch._inductor.package import load_package  # 70 MB of code, for each alike

    requests = torch.load(folder / REQUESTS, weights_only=True)
    before = resident()
    packages = {name: load_package(str(folder / f"{name}.pt2")) for name in names}
    answers = {
        name: [package(request).tolist() for request in requests]
        for name, package in packages.items()
    }
    grown = resident() - before
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name, package in packages.items():
            start = time.perf_counter()
            package(requests[turn % len(requests)])
            times[name].append(1000 * (time.perf_counter() - start))
    return {
        "answers": answers,
        "grown": grown,
        "milliseconds": {name: statistics.median(t) for name, t in times.items() if t},
        "autoamp": "autoamp" in sys.modules,
    }


def served_apart(folder: Path, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """What `serve` finds in a new process, which sees none of autoamp's variables."""
    done = subprocess.run(
        [sys.executable, __file__, "--rounds", str(rounds), "--serve", folder, *names],
        env={k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- the process that exports ----------------------------------------------------------


class Classifier(nn.Module):
    """A BERT that takes tokens and returns numbers, as plain tensors."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=1024,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            max_position_embeddings=64,
            num_labels=10,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=tokens).logits
        return logits


class UnderAutocast(nn.Module):
    """A model with a region of `torch.autocast` around its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = self.model(tokens)
        return logits


@dataclass(frozen=True)
class Served:
    """What the package of one way does, beside the program that it was compiled from.

    Attributes:
        apart: the largest difference of an answer to that of the program, run eagerly.
        error: the largest difference of the program's answers to those in fp64.
    """

    size: int
    grown: int
    milliseconds: float
    apart: float
    error: float
    knows_autoamp: bool

    @property
    def bound(self) -> float:
        """How far the package may be from its low program.

        AOTInductor keeps values in fp32 inside a kernel where the program rounds them.
        It leaves roundings out and adds none, so it is about as near to fp64 as the
        program is.  Two answers that are each within `error` of a third are within
        twice that of each other.
        """
        return 2 * self.error


def export_all(
    model: nn.Module, converted: nn.Module, example: Tensor, folder: Path
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Writes the packages of all three ways; returns their programs, run eagerly."""
    import autoamp

    programs = {
        "fp32": torch.export.export(model, (example,)),
        "autocast": torch.export.export(UnderAutocast(model), (example,)),
    }
    for name, program in programs.items():
        path = str(folder / f"{name}.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    programs["autoamp"] = autoamp.export(
        converted, (example,), target="aoti", out=folder / "autoamp.pt2"
    )
    return {name: program.module() for name, program in programs.items()}


def region_is_lost(model: nn.Module, example: Tensor) -> bool:
    """Whether a region around `torch.export` leaves the program in fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        program = torch.export.export(model, (example,))
    return torch.equal(program.module()(example), model(example))


def largest(answers: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of two answers to one request."""
    pairs = zip(answers, others, strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def all_served(
    programs: Mapping[str, Callable[[Tensor], Tensor]],
    exact: Sequence[Tensor],
    requests: Sequence[Tensor],
    folder: Path,
    rounds: int,
) -> dict[str, Served]:
    """Each package in a process of its own, and all in one for the times."""
    together = served_apart(folder, list(programs), rounds)
    found = {}
    for name, program in programs.items():
        alone = served_apart(folder, [name], 0)
        answers = [torch.tensor(answer) for answer in alone["answers"][name]]
        eager = [program(request) for request in requests]
        found[name] = Served(
            size=(folder / f"{name}.pt2").stat().st_size,
            grown=alone["grown"],
            milliseconds=together["milliseconds"][name],
            apart=largest(answers, eager),
            error=largest(eager, exact),
            knows_autoamp=alone["autoamp"] or together["autoamp"],
        )
    return found


def bf16_line() -> str:
    """The machine, and whether times in bf16 mean anything on it."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        words = set()
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if words & {"amx_bf16", "avx512_bf16", "bf16"}:
        return f"{machine}, with bf16 units."
    return (
        f"{machine}; no bf16 units found. bf16 is emulated here and slower than fp32,\n"
        "so the times below say nothing of mixed precision."
    )


def show(found: Mapping[str, Served]) -> None:
    """A line for each way."""
    print(f"{'':9}{'file':>17}{'memory':>19}{'a call':>12}{'from its program':>20}")
    base = found["fp32"]
    for name, served in found.items():
        share = served.size / base.size
        memory = served.grown / base.grown if base.grown else float("nan")
        print(
            f"{name:9}{served.size / 1e6:7.1f} MB {share:5.0%} "
            f"{served.grown / 1e6:9.1f} MB {memory:5.0%} "
            f"{served.milliseconds:8.2f} ms {served.apart:18.1e}"
        )


def checks(found: Mapping[str, Served], *, same: bool) -> dict[str, bool]:
    """What has to hold, in words, and whether it does.

    Args:
        same: whether the exported program answers as the converted model does.
    """
    ours = found["autoamp"]
    return {
        "the exported program answers as the converted model, bit for bit": same,
        f"the package is within {ours.bound:.1e} of the program": (
            ours.error > 0 and ours.apart <= ours.bound
        ),
        f"its file is at most {SMALLER} of fp32's": (
            ours.size <= SMALLER * found["fp32"].size
        ),
        "the serving processes imported no autoamp": not any(
            served.knows_autoamp for served in found.values()
        ),
    }


@torch.no_grad()
def compare(given: argparse.Namespace, folder: Path) -> bool:
    """Exports, serves, compares; whether all is right."""
    import autoamp

    torch.manual_seed(0)
    model = Classifier(given.width, given.layers).eval()
    requests = [torch.randint(1024, (1, 64)) for _ in range(4)]
    torch.save(requests, folder / REQUESTS)
    converted = autoamp.convert(copy.deepcopy(model), **OPTIONS)
    truth = copy.deepcopy(model).double()
    exact = [truth(request) for request in requests]

    programs = export_all(model, converted, requests[0], folder)
    found = all_served(programs, exact, requests, folder, given.rounds)
    show(found)
    lost = region_is_lost(model, requests[0])
    print(
        "\nA region around torch.export is "
        + ("not in the program, which computes in fp32." if lost else "in the program.")
    )
    program = programs["autoamp"]
    same = all(torch.equal(program(x), converted(x)) for x in requests)
    told = checks(found, same=same)
    for what, holds in told.items():
        print("yes" if holds else "NO ", what)
    return all(told.values())


def main(argv: list[str] | None = None) -> int:
    """Exports and serves, or is the process that serves; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--width", type=int, default=512, help="64 times the heads")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="calls that are timed")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.serve:
        folder, *names = given.serve
        print(json.dumps(serve(Path(folder), names, given.rounds)))
        return 0
    print(f"{bf16_line()}\n")
    with tempfile.TemporaryDirectory() as folder:
        right = compare(given, Path(folder))
    print("Served and right." if right else "NOT right.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
