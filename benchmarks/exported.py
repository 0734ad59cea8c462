"""`python -m benchmarks.exported`: ten models exported, reloaded and run elsewhere.

Each model and precision runs in a process of its own.  Nothing here is timed: results,
bytes and errors are the same on every machine of one kind of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoamp
from autoamp.passes.saved import diff
from autoamp.tools.export_files import plan_in

from . import report
from .models import full
from .report import Data, option, said

PRECISIONS = ("bf16", "fp16")
LENGTH, BATCH = 16, 2

NOTE = """\
Models at the sizes that people run (small ones with --quick), random weights, exported
from a converted model
(`do_no_harm=False`), two samples of 16 tokens or small images. "same bits": a fresh
process without autoamp loads the .pt2 and gives the converted model's results to the
bit. "weights": bytes of the weights in the file over those in fp32; "files": size of
the .pt2 over that of the fp32 model's. "twice": weights held in both precisions, with
their share of the fp32 bytes. "ONNX error": largest error of ONNX Runtime (CPU, fp16)
against float64 over that of the converted model. "differ": ops that `autoamp diff`
finds in other precision in the .onnx than in the .pt2. "AOT error": as "ONNX error", of
the package that AOTInductor compiles; measured with --aoti ("fails": a kernel that the
package calls is missing on this CPU)."""

CHILD = """\
import sys, torch
values, expected = torch.load("call.pt")
module = torch.export.load("model.pt2").module()
with torch.no_grad():
    results = torch.utils._pytree.tree_leaves(module(*values))
assert "autoamp" not in sys.modules
same = [torch.equal(a, b) for a, b in zip(results, expected, strict=True)]
print(all(same))
"""


class _First(nn.Module):
    """A model of transformers, of which the first result is taken."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)[0]


class _UNet(nn.Module):
    """A small U-Net: two levels, group norms, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = _two_convolutions(3, 64), _two_convolutions(64, 128)
        self.up, self.out = _two_convolutions(192, 64), nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Any:
        skip = self.down(x)
        deep = self.deep(nn.functional.max_pool2d(skip, 2))
        wide = nn.functional.interpolate(deep, scale_factor=2.0, mode="nearest")
        return self.out(self.up(torch.cat([skip, wide], 1)))


def _two_convolutions(inside: int, outside: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers.append(nn.Conv2d(channels, outside, 3, padding=1))
        layers += [nn.GroupNorm(8, outside), nn.SiLU()]
    return nn.Sequential(*layers)


class _LSTM(nn.Module):
    """Two layers of 512 states and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.out = (
            nn.LSTM(256, 512, 2, batch_first=True),
            nn.Linear(512, 8),
        )

    def forward(self, x: Tensor) -> Any:
        return self.out(self.states(x)[0])


def _whisper(quick: bool) -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    size = {"d_model": 128, "encoder_layers": 2, "encoder_attention_heads": 4}
    size |= {"encoder_ffn_dim": 256}
    config = hf.WhisperConfig(**(size if quick else {}), max_source_positions=50)
    return _First(WhisperEncoder(config))


def _ids(vocab: int = 1000) -> Tensor:
    return torch.randint(0, vocab, (BATCH, LENGTH))


def _image(side: int = 64) -> Tensor:
    return torch.randn(BATCH, 3, side, side)


Made = Callable[[bool], tuple[nn.Module, Tensor]]

MODELS: dict[str, Made] = {
    "gpt2": lambda q: (_First(full("gpt2", q)), _ids()),
    "bert": lambda q: (_First(full("bert", q)), _ids()),
    "llama": lambda q: (_First(full("llama", q)), _ids()),
    "t5_encoder": lambda q: (_First(full("t5", q).get_encoder()), _ids()),
    "vit": lambda q: (_First(full("vit", q)), _image(64 if q else 224)),
    "resnet50": lambda q: (_First(full("resnet50", q)), _image()),
    "convnext": lambda q: (_First(full("convnext_tiny", q)), _image()),
    "unet": lambda _: (_UNet(), _image(32)),
    "lstm": lambda _: (_LSTM(), torch.randn(BATCH, LENGTH, 256)),
    "whisper_encoder": lambda q: (_whisper(q), torch.randn(BATCH, 80, 100)),
}


def measured(name: str, precision: str, *, quick: bool, aoti: bool) -> Data:
    """The row of one model in one precision."""
    torch.manual_seed(0)
    model, x = MODELS[name](quick)
    model.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exact = _leaves(model.double()(x.double() if x.is_floating_point() else x))
        model.float()
        plain = f"{folder}/fp32.pt2"
        torch.export.save(torch.export.export(model, (x,)), plain)
        autoamp.convert(model, precision=precision, do_no_harm=False)
        ours = _leaves(model(x))
        out = f"{folder}/model.pt2"
        program = autoamp.export(model, (x,), out=out)
        torch.save(((x,), ours), f"{folder}/call.pt")
        run = [sys.executable, "-c", CHILD]
        child = subprocess.run(run, cwd=folder, capture_output=True, check=True)
        held = program.state_dict
        twice = [n for n in held if n.endswith(f"_{precision}")]
        wide = sum(p.numel() * 4 for p in [*model.parameters(), *model.buffers()])
        row: Data = {
            "name": name,
            "precision": precision,
            "same": child.stdout.decode().strip() == "True",
            "weights": _bytes(held.values()) / wide,
            "files": os.path.getsize(out) / os.path.getsize(plain),
            "twice": [len(twice), sum(held[n].numel() * 4 for n in twice) / wide],
        }
        onnx = f"{folder}/model.onnx"
        autoamp.export(model, (x,), target="onnx", out=onnx)
        found = diff(plan_in(out)[1], plan_in(onnx)[1])
        row["differ"] = len(found.changed) + len(found.appeared) + len(found.vanished)
        if precision == "fp16":
            row["onnx"] = _worst(_by_onnx_runtime(onnx, x), ours, exact)
        if aoti:
            package = f"{folder}/package.pt2"
            autoamp.export(model, (x,), target="aoti", out=package)
            try:
                row["aoti"] = _worst(_leaves(autoamp.load(package)(x)), ours, exact)
            except RuntimeError as error:  # of a kernel that this CPU lacks
                row["aoti_failure"] = said(error)
    return row


def _leaves(results: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _by_onnx_runtime(path: str, x: Tensor) -> list[Tensor]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings)
    (given,) = session.get_inputs()
    return [torch.as_tensor(y) for y in session.run(None, {given.name: x.numpy()})]


def _worst(
    theirs: Sequence[Tensor], ours: Sequence[Tensor], exact: Sequence[Tensor]
) -> float:
    """The largest ratio of an error of `theirs` to that of `ours`."""
    each = zip(theirs, ours, exact, strict=True)
    return max(float((t - e).norm() / (o - e).norm()) for t, o, e in each)


HEADER = (
    *("model", "same bits", "weights", "files", "twice"),
    *("ONNX error", "differ", "AOT error"),
)


def _line(row: Data) -> list[str]:
    count, share = row["twice"]
    return [
        f"{row['name']}, {row['precision']}",
        "yes" if row["same"] else "NO",
        f"{row['weights']:.3f}",
        f"{row['files']:.3f}",
        f"{count} ({share:.2f})" if count else "",
        f"{row['onnx']:.2f}" if "onnx" in row else "",
        str(row["differ"]),
        f"{row['aoti']:.2f}" if "aoti" in row else "fails" * ("aoti_failure" in row),
    ]


def measure(given: argparse.Namespace) -> Data:
    """The rows of all models, each from a process of its own."""
    flags = ["--quick"] * given.quick + ["--aoti"] * given.aoti
    rows = []
    for name in [given.model] if given.model else MODELS:
        for precision in PRECISIONS:
            command = [sys.executable, "-m", "benchmarks.exported", "--one", precision]
            command += ["--model", name, *flags]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            rows.append(json.loads(done.stdout.decode().splitlines()[-1]))
    return {"rows": rows}


def text(data: Data) -> str:
    """The page."""
    table = report.markdown(HEADER, [_line(row) for row in data["rows"]])
    return report.page(data, NOTE, table)


TABLE = report.Table(
    "exported",
    measure,
    text,
    options=(
        option("--model", None, "one model alone", choices=[*MODELS]),
        report.QUICK,
        option("--aoti", False, "compile packages too", action="store_true"),
    ),
    stem=lambda given: "exported" + "-small" * given.quick,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports all models; with `--one PRECISION --model NAME` one, printed as JSON."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    if words[:1] != ["--one"]:
        return TABLE.main(words)
    _, precision, _, name, *flags = words
    told = {"quick": "--quick" in flags, "aoti": "--aoti" in flags}
    print(json.dumps(measured(name, precision, **told)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
