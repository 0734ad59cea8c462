"""`python -m benchmarks.decoding`: `generate()` of 64 tokens, one row, on this CPU.

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
from .capability import capability
from .processes import commit, commits, failures, said
from .ratios import Row
from .timing import interleaved, ratios

STEM = "decoding"
TOKENS, PROMPT, ROUNDS, WARM_UP = 64, 16, 7, 2
WAYS = ("fp32", "autocast", "autoamp", "bfloat16")
VOCAB = 8000
NAMES = ("gpt2, dynamic", "gpt2, static", "llama, dynamic", "llama, static")
HEADER = ("model, cache", "bfloat16, ms a token", *WAYS[:3], "of autocast", "graphs")

NOTE = f"""\
`generate()` of {TOKENS} tokens after a prompt of {PROMPT}, one row, greedy, with the
default options, as part of the time of the same call of `model.bfloat16()`: medians of
{ROUNDS} interleaved rounds. "of autocast": autoamp's time over that of torch.autocast.
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


def generator(name: str, way: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model run one way, and a call that generates."""
    kind, cache = name.split(", ")
    model: Any = model_of(kind)
    if way == "bfloat16":
        model = model.bfloat16()
    if way == "autoamp":
        autoamp.convert(model, precision="bf16")
    prompt = _prompt()
    limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    # A static cache makes transformers compile the model: that is not what is timed.
    stored = {"cache_implementation": "static", "disable_compile": True}
    given = limits | (stored if cache == "static" else {})

    def generate() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)

    return model, generate


def measured(name: str) -> Row:
    """The seconds of each way in each round, and the graphs of the converted model."""
    row: Row = {"name": name, "commit": commit(), "ways": {}, "failures": {}}
    calls, graphs = {}, []
    for way in WAYS:
        try:
            model, generate = generator(name, way)
            for _ in range(WARM_UP):
                generate()
                if way == "autoamp":
                    graphs.append(len(autoamp.report(model).graphs))
            calls[way] = generate
            if way == "autoamp":
                converted = model
        except Exception as error:  # noqa: BLE001 - the other ways are still timed
            row["failures"][way] = said(error)
    times = interleaved(calls, ROUNDS)
    row["ways"] = {way: {"seconds": each} for way, each in times.items()}
    if graphs:
        row["graphs"] = [graphs[0], len(autoamp.report(converted).graphs)]
    return row


def brief(row: Row) -> str:
    """The shares of a row in one line."""
    return ", ".join(f"{way} {share:.2f}" for way, share in _shares(row).items())


def _shares(row: Row) -> dict[str, float]:
    taken = {way: each["seconds"] for way, each in row["ways"].items()}
    return ratios(taken, "bfloat16") if "bfloat16" in taken else {}


def write(rows: Sequence[Row], folder: Path) -> str:
    """Writes the table and its rows to `folder`; returns the text."""
    lines = []
    for row in rows:
        shares = _shares(row)
        taken = {way: each["seconds"] for way, each in row["ways"].items()}
        time = 1e3 * statistics.median(taken["bfloat16"]) / TOKENS
        cells = [f"{shares[w]:.2f}" if w in shares else "failed" for w in WAYS[:3]]
        whole = {"autocast", "autoamp"} <= taken.keys()
        over = f"{ratios(taken, 'autocast')['autoamp']:.2f}" if whole else "failed"
        graphs = " / ".join(map(str, row.get("graphs", ())))
        lines.append([row["name"], f"{time:.1f}", *cells, over, graphs])
    head = f"{capability('cpu')}; commit {commits(rows)}"
    parts = [head, "", NOTE, "", report.markdown(HEADER, lines), "", *failures(rows)]
    text = "\n".join(parts).rstrip() + "\n"
    kept = {"capability": capability("cpu"), "models": list(rows)}
    report.write(folder / STEM, text, kept)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.decoding",
        arguments,
        names=NAMES,
        measured=measured,
        write=write,
        brief=brief,
    )


if __name__ == "__main__":
    raise SystemExit(main())
