"""`python -m benchmarks.decoding`: `generate()` of 64 tokens of one row.

Each model and kind of cache runs in a process of its own; all ways take one `generate`
in each round, in another order each time.  Placements are counted, since a cache that
grows must not cause new ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import autoamp

from . import report, step_times
from .bytes_step import low_way
from .processes import commit, said
from .ratios import Row
from .setting import Setting
from .step_times import CPU_BF16, QUICK_ROUNDS
from .timing import interleaved, ratios

STEM = "decoding"
TOKENS, PROMPT, ROUNDS, WARM_UP = 64, 16, 7, 2
WAYS = ("fp32", "autocast", "autoamp")
"""The ways beside the model in low precision, which is what they are compared with."""

VOCAB = 8000
NAMES = ("gpt2, dynamic", "gpt2, static", "llama, dynamic", "llama, static")

NOTE = """\
`generate()` of {tokens} tokens after a prompt of {prompt}, one row, greedy, with the
default options, as part of the time of the same call of `model.to({low})`: medians of
{rounds} interleaved rounds. "of autocast": autoamp's time over that of torch.autocast.
"graphs": the graphs of the model after the first `generate`, and after all."""


def model_of(kind: str) -> nn.Module:
    """A GPT-2 or a Llama of 6 layers, 768 wide, with random weights."""
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=VOCAB, n_layer=6, **ends)
        return hf.GPT2LMHeadModel(config).eval()  # type: ignore[no-any-return]
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        **ends,
    )
    return hf.LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


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
    row: Row = {"name": name, "commit": commit(), "ways": {}, "failures": {}}
    calls, graphs = {}, []
    for way in (*WAYS, low_way(setting)):
        try:
            model, generate = generator(name, way, setting)
            for _ in range(WARM_UP):
                generate()
                if way == "autoamp":
                    graphs.append(len(autoamp.report(model).graphs))
            calls[way] = generate
            if way == "autoamp":
                converted = model
        except Exception as error:  # noqa: BLE001 - the other ways are still timed
            row["failures"][way] = said(error)
    times = interleaved(calls, _rounds(setting), setting.device)
    row["ways"] = {way: {"seconds": each} for way, each in times.items()}
    if graphs:
        row["graphs"] = [graphs[0], len(autoamp.report(converted).graphs)]
    return row


def _rounds(setting: Setting) -> int:
    return QUICK_ROUNDS if setting.quick else ROUNDS


def brief(row: Row) -> str:
    """The shares of a row in one line."""
    return ", ".join(f"{way} {share:.2f}" for way, share in _shares(row).items())


def _shares(row: Row) -> dict[str, float]:
    """The shares of the time in low precision, which is the way that comes last."""
    taken = {way: each["seconds"] for way, each in row["ways"].items()}
    (low,) = taken.keys() - {*WAYS} or {""}
    return ratios(taken, low) if low else {}


def write(rows: Sequence[Row], folder: Path, setting: Setting = CPU_BF16) -> str:
    """Writes the table and its rows to `folder`; returns the text."""
    lines, low = [], low_way(setting)
    for row in rows:
        shares = _shares(row)
        taken = {way: each["seconds"] for way, each in row["ways"].items()}
        time = f"{1e3 * statistics.median(taken[low]) / TOKENS:.1f}" if shares else "-"
        cells = [f"{shares[w]:.2f}" if w in shares else "failed" for w in WAYS]
        whole = {"autocast", "autoamp"} <= taken.keys()
        over = f"{ratios(taken, 'autocast')['autoamp']:.2f}" if whole else "failed"
        graphs = " / ".join(map(str, row.get("graphs", ())))
        lines.append([row["name"], time, *cells, over, graphs])
    note = NOTE.format(tokens=TOKENS, prompt=PROMPT, low=low, rounds=_rounds(setting))
    header = ("model, cache", f"{low}, ms a token", *WAYS, "of autocast", "graphs")
    tables = [report.markdown(header, lines)]
    return step_times.write_text(
        folder / setting.stem(STEM), rows, note, tables, setting
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.decoding",
        arguments,
        names=lambda _: NAMES,
        measured=measured,
        write=write,
        brief=brief,
    )


if __name__ == "__main__":
    raise SystemExit(main())
