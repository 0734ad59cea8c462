"""`python -m benchmarks.decoding`: `generate()` of 64 tokens of one row.

Each model and kind of cache runs in a process of its own; all ways take one `generate`
in each round, in another order each time.  Placements are counted, since a cache that
grows must not cause new ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import autoamp

from . import models, processes, report
from .processes import Row, new_row
from .report import said
from .setting import Setting
from .step_times import QUICK_ROUNDS
from .timing import interleaved, ratios, repeated
from .ways import CPU_BF16, low_way

TOKENS, PROMPT, ROUNDS, WARM_UP = 64, 16, 7, 2
WAYS = ("fp32", "autocast", "autoamp")
"""The ways beside the model in low precision, which is what they are compared with."""

NAMES = ("gpt2, dynamic", "gpt2, static", "llama, dynamic", "llama, static")

NOTE = """\
`generate()` of {tokens} tokens after a prompt of {prompt}, one row, greedy, with the
default options, as part of the time of the same call of `model.{low}()`: medians of
{rounds} interleaved rounds. "of autocast": autoamp's time over that of torch.autocast.
"graphs": the graphs of the model after the first `generate`, and after all."""


def model_of(kind: str) -> nn.Module:
    """A GPT-2 or a Llama of 6 layers, 768 wide, with random weights."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    given |= {"vocab_size": 8000, "use_cache": True}
    if kind == "gpt2":
        return models.gpt2(n_layer=6, **given).eval()
    given |= {"hidden_size": 768, "intermediate_size": 2048}
    return models.llama(num_hidden_layers=6, num_attention_heads=12, **given).eval()


def one_token() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A GPT-2 and the arguments of one step of decoding, without a cache."""
    return model_of("gpt2"), (), {"input_ids": _prompt()[:, :1], "use_cache": False}


def _prompt() -> Tensor:
    return torch.arange(2, 2 + PROMPT)[None]


def generator(
    name: str, way: str, setting: Setting = CPU_BF16
) -> tuple[nn.Module, Callable[[], None]]:
    """A model run one way, and a call that generates."""
    kind, cache = name.split(", ")
    model: Any = model_of(kind).to(setting.device)
    if way == low_way(setting):
        model = model.to(setting.low)
    if way == "autoamp":
        autoamp.convert(model, precision=setting.precision)
    prompt = _prompt().to(setting.device)
    limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    # A static cache makes transformers compile the model: that is not what is timed.
    stored = {"cache_implementation": "static", "disable_compile": True}
    given = limits | (stored if cache == "static" else {})

    def generate() -> None:
        with torch.autocast(setting.device, setting.low, enabled=way == "autocast"):
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)

    return model, generate


def measured(name: str, setting: Setting = CPU_BF16) -> Row:
    """The seconds of each way in each round, and the graphs of the converted model."""
    row = new_row(name)
    calls, graphs = {}, []
    for way in (*WAYS, low_way(setting)):
        try:
            model, generate = generator(name, way, setting)
            generate()
            if way == "autoamp":
                converted, graphs = model, [len(autoamp.report(model).graphs)]
            repeated(generate, WARM_UP - 1)
            calls[way] = generate
        except Exception as error:  # noqa: BLE001 - the other ways are still timed
            row["failures"][way] = said(error)
    times = interleaved(calls, _rounds(setting), setting.device)
    row["ways"] = {way: {"seconds": each} for way, each in times.items()}
    if graphs:
        row["graphs"] = [*graphs, len(autoamp.report(converted).graphs)]
    return row


def _rounds(setting: Setting) -> int:
    return QUICK_ROUNDS if setting.quick else ROUNDS


def _seconds(row: Row) -> dict[str, list[float]]:
    return {way: each["seconds"] for way, each in row["ways"].items()}


def _shares(row: Row) -> dict[str, float]:
    """The shares of the time in low precision, which is the way that comes last."""
    (low,) = row["ways"].keys() - {*WAYS} or {""}
    return ratios(_seconds(row), low) if low else {}


def brief(row: Row) -> str:
    """The shares of a row in one line."""
    return ", ".join(f"{way} {share:.2f}" for way, share in _shares(row).items())


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page."""
    lines, low = [], low_way(setting)
    for row in rows:
        shares, taken = _shares(row), _seconds(row)
        time = f"{1e3 * statistics.median(taken[low]) / TOKENS:.1f}" if shares else "-"
        cells = [f"{shares[w]:.2f}" if w in shares else "failed" for w in WAYS]
        whole = {"autocast", "autoamp"} <= taken.keys()
        over = f"{ratios(taken, 'autocast')['autoamp']:.2f}" if whole else "failed"
        graphs = " / ".join(map(str, row.get("graphs", ())))
        lines.append([row["name"], time, *cells, over, graphs])
    note = NOTE.format(tokens=TOKENS, prompt=PROMPT, low=low, rounds=_rounds(setting))
    header = ("model, cache", f"{low}, ms a token", *WAYS, "of autocast", "graphs")
    return processes.page(rows, machine, note, report.markdown(header, lines))


TABLE = processes.ModelTable("decoding", lambda _: NAMES, measured, text, brief)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
