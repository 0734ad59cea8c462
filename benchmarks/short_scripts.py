"""`python -m benchmarks.short_scripts`: twenty short scripts, AUTOAMP_ENABLE=0 and 1.

Every script is a process of its own with one thread, and makes as many steps as take
its seconds in fp32.  CPU seconds are compared, with the import of torch in them, less
by what other work on the machine is moved.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from rich.progress import track

from . import report
from .setting import capability

SCRIPT = """
import sys, time, torch
from torch import nn
kind, trains = sys.argv[1], sys.argv[2] == "trains"
seconds, steps = map(int, sys.argv[3:])
torch.set_num_threads(1), torch.manual_seed(0)
blocks = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten()]
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model, x = {
    "mlp": (nn.Sequential(nn.Linear(99, 999), nn.ReLU(), nn.Linear(999, 9)), (64, 99)),
    "convnet": (nn.Sequential(*blocks, nn.Linear(18432, 10)), (16, 3, 28, 28)),
    "transformer": (nn.TransformerEncoder(layer, 4), (8, 64, 128)),
    "lstm": (nn.LSTM(128, 256, 2, batch_first=True), (16, 32, 128)),
}[kind]
x, optimizer = torch.randn(x), torch.optim.AdamW(model.parameters())
model.train(trains)
def step():
    with torch.set_grad_enabled(trains):
        out = model(x)
    if trains:
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
if not steps:
    step()
    begin, steps = time.process_time(), 0
    while time.process_time() < begin + 1:
        step()
        steps += 1
    print(seconds * steps), sys.exit()
for _ in range(steps):
    step()
"""
KINDS = ("mlp", "convnet", "transformer", "lstm")
SECONDS = {"trains": (1, 5, 20), "evaluates": (5, 20)}


def seconds_of(words: list[str], **variables: str) -> tuple[float, str, str]:
    """CPU seconds of a script, and what it prints on stdout and on stderr."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "AUTOAMP_CALIBRATE": "0",
            **variables,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, done.stdout, done.stderr


def text(figures: report.Data) -> str:
    """The page."""
    header = ["script", "fp32 CPU s", "automatic CPU s", "ratio", ""]
    return f"{figures['machine']}\n\n{report.markdown(header, figures['rows'])}\n"


def main() -> None:
    """Writes `short_scripts.md` and its JSON."""
    rows, scripts = [], [(k, h, s) for h in SECONDS for k in KINDS for s in SECONDS[h]]
    for kind, how, seconds in track(scripts):
        words = [kind, how, str(seconds)]
        steps = seconds_of([*words, "0"], AUTOAMP_ENABLE="0")[1].strip()
        plain, _, _ = seconds_of([*words, steps], AUTOAMP_ENABLE="0")
        ours, _, lines = seconds_of([*words, steps], AUTOAMP_ENABLE="1")
        captured = "as it is" if "ran as it is" in lines else "captured"
        ratio = f"{ours / plain:.2f}"
        rows.append([f"{kind} {how}", f"{plain:.1f}", f"{ours:.1f}", ratio, captured])
    machine = f"{capability('cpu')}; commit {report.commit()}; one thread"
    figures = {"machine": machine, "rows": rows}
    report.write(report.RESULTS / "short_scripts", text(figures), figures)
    print(text(figures))


if __name__ == "__main__":
    main()
