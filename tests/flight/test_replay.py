"""`autoamp replay`: planted deaths are replayed to the line, in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from autoamp.flight import folder
from tests.processes import run_script

REPO = Path(__file__).resolve().parents[2]

BEGIN = """
import sys, torch
from torch import nn
import autoamp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        {forward}

def run():
    torch.manual_seed(0)
    model = autoamp.convert(
        Net(), precision="{precision}", do_no_harm=False, record="flight", {options}
    )
    optimizer = torch.optim.{optimizer}
    {setup}
    for step in range({steps}):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        labels = torch.zeros(8, 16)
        {before}
        out = model(x)
        loss = {loss}
        loss.backward()
        optimizer.step()
        {after}

run()
"""
USUAL = {
    "forward": "return self.second(self.first(x).relu())",
    "precision": "bf16",
    "options": "",
    "optimizer": "SGD(model.parameters(), lr=1e-3)",
    "steps": "6",
    "setup": "",
    "before": "",
    "loss": "(out - labels).square().mean()",
    "after": "",
}


def script(**parts: str) -> str:
    """A training script; each part may have several lines."""
    found = BEGIN
    for name, given in {**USUAL, **parts}.items():
        room = next(
            line[: len(line) - len(line.lstrip())]
            for line in BEGIN.splitlines()
            if f"{{{name}}}" in line
        )
        text = textwrap.indent(textwrap.dedent(given).strip(), room).strip()
        found = found.replace(f"{{{name}}}", text)
    return found


def python(where: Path, *arguments: str) -> Any:
    """A process that begins with nothing imported."""
    environ = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        env={**os.environ, **environ},
        check=False,
        capture_output=True,
        text=True,
    )


def die(where: Path, text: str) -> None:
    (where / "train.py").write_text(text)
    done = run_script(where / "train.py", cwd=where)
    assert done.returncode == 0, done.stderr
    assert any(folder.deaths(home) for home in folder.homes(where / "flight"))


def command(where: Path, *arguments: str) -> Any:
    """`autoamp replay flight ...` in a process of its own."""
    source = "from autoamp_cli import main\nmain(prog_name='autoamp')"
    return run_script(source, "replay", "flight", *arguments, cwd=where)


def replay(where: Path, *arguments: str) -> tuple[dict[str, Any], int, str]:
    done = command(where, "--json", *arguments)
    assert done.returncode in {0, 1, 3}, done.stderr
    return json.loads(done.stdout), done.returncode, done.stderr


def died(where: Path, text: str, *arguments: str) -> tuple[dict[str, Any], int]:
    die(where, text)
    before = sorted(where.rglob("*"))
    found, status, err = replay(where, *arguments)
    assert found["reproduced"], (found, err)
    after = [p for p in where.rglob("*") if "__pycache__" not in p.parts]
    assert {p for p in after if p.suffix != ".toml"} <= {*before}
    return found, status


GROWING = script(
    precision="fp16",
    options='loss_scale="off"',
    forward="""
        q, k = self.first(x), self.second(x)
        scores = torch.matmul(q, k.t())
        return torch.softmax(scores, -1) @ x
    """,
    before="""
        with torch.no_grad():
            for each in (model.first, model.second):
                each.weight.mul_(6)
    """,
)


@pytest.mark.slow
def test_attention_logits_that_grow(tmp_path: Path) -> None:
    found, status = died(tmp_path, GROWING, "--write", "cure.toml")
    assert "scores = torch.matmul(q, k.t())" in found["source"]
    assert (found["kind"], found["dtype"]) == ("op", "fp16")
    assert 65504 < found["magnitude"] < 1e9
    assert found["rule"]
    assert status == 0
    rule = (tmp_path / "cure.toml").read_text()
    assert "[deny]" in rule or "[keep]" in rule
    healed = GROWING.replace('record="flight"', 'rules="cure.toml"')
    healed = healed.replace("range(6)", "range(4)").replace(
        "optimizer.step()", "assert loss.isfinite()"
    )
    (tmp_path / "healed.py").write_text(healed)
    assert run_script(tmp_path / "healed.py", cwd=tmp_path).returncode == 0


@pytest.mark.thorough
def test_a_bad_batch(tmp_path: Path) -> None:
    bad = "if step == 3: x[2, 1] = torch.inf"
    found, status = died(tmp_path, script(before=bad))
    assert found["kind"] == "input"
    assert found["headline"] == "the batch holds inf in x"
    assert (found["in_fp32"], status) == (True, 1)


@pytest.mark.thorough
def test_bad_labels(tmp_path: Path) -> None:
    bad = "if step == 3: labels[2, 1] = torch.nan"
    found, status = died(tmp_path, script(before=bad))
    assert found["headline"] == "the batch holds NaN in labels"
    assert status == 1


@pytest.mark.thorough
def test_a_learning_rate_spike(tmp_path: Path) -> None:
    spike = "optimizer.param_groups[0]['lr'] = 1e26 if step == 3 else 1e-3"
    spike += "\nif step == 4: optimizer.param_groups[0]['lr'] = 1e26"
    found, status = died(tmp_path, script(before=spike))
    told = found["headline"] + "".join(found["more"])
    assert "1e+26" in told
    assert "self.second(self.first(x).relu())" in found["source"]
    assert status == 1


@pytest.mark.thorough
def test_a_weight_that_was_flipped(tmp_path: Path) -> None:
    flip = """
        if step == 3:
            with torch.no_grad(): model.second.weight[1, 2] = torch.inf
    """
    found, status = died(
        tmp_path, script(before=flip, optimizer="AdamW(model.parameters())")
    )
    assert (found["kind"], found["name"]) == ("weight", "second.weight")
    assert "1 of 256 numbers" in found["headline"]
    assert "at step 3 the loss was" in found["headline"]
    assert "written from outside" in found["headline"]
    assert status == 1


@pytest.mark.thorough
def test_the_optimizer(tmp_path: Path) -> None:
    """The optimizer divides 0 by 0, since one input is always 0."""
    text = script(
        forward="return self.second((self.first(x) * (x[:, :1] > 99)).relu())",
        optimizer="AdamW(model.parameters(), eps=0.0)",
    )
    found, status = died(tmp_path, text)
    assert found["kind"] == "optimizer"
    assert "optimizer.step()" in found["source"]
    assert "eps=0" in found["headline"]
    assert status == 1


@pytest.mark.thorough
def test_the_loss(tmp_path: Path) -> None:
    text = script(
        before="factor = torch.tensor(0.0 if step == 3 else 1.0)",
        loss="(out.abs().mean() * factor).log()",
    )
    found, status = died(tmp_path, text)
    assert found["kind"] == "loss"
    assert "loss = (out.abs().mean() * factor).log()" in found["source"]
    assert "log" in found["op"]
    assert status == 1


@pytest.mark.thorough
def test_only_the_backward(tmp_path: Path) -> None:
    """The root of 0 is 0, and its slope is infinite."""
    text = script(
        forward="""
            y = self.first(x)
            y = (y * self.second.bias[0]).abs().sqrt()
            return self.second(y)
        """,
        before="""
            if step == 3: model.second.bias.data[0] = 0.0
        """,
        optimizer="SGD([model.first.weight], lr=1e-3)",
    )
    found, status = died(tmp_path, text)
    assert found["backward"]
    assert "y = (y * self.second.bias[0]).abs().sqrt()" in found["source"]
    assert (found["in_fp32"], status) == (True, 1)


@pytest.mark.slow
def test_a_checkpointed_region(tmp_path: Path) -> None:
    text = script(
        precision="fp16",
        options='loss_scale="off"',
        forward="""
            def inside(x):
                y = self.first(x)
                y = torch.matmul(y, y.t())
                return torch.matmul(y / y.abs().amax(), x)
            region = torch.utils.checkpoint.checkpoint
            return self.second(region(inside, x, use_reentrant=False))
        """,
        before="if step == 3: x = x * 1000",
    )
    found, status = died(tmp_path, text)
    assert "y = torch.matmul(y, y.t())" in found["source"]
    assert (found["dtype"], status) == ("fp16", 0)


@pytest.mark.slow
def test_after_a_resume(tmp_path: Path) -> None:
    """The first process saves a checkpoint; the second one resumes, and dies."""
    text = script(
        options='loss_scale="off"',
        precision="fp16",
        optimizer="AdamW(model.parameters(), lr=1e-3)",
        setup="""
            import os
            if os.path.exists("last.pt"):
                model.load_state_dict(torch.load("last.pt"))
                model.first.weight.data.mul_(1e3)
        """,
        forward="""
            y = self.first(x)
            return self.second(y * y)
        """,
        after="""
            if step == 2 and not os.path.exists("last.pt"):
                torch.save(model.state_dict(), "last.pt")
                return
        """,
    )
    (tmp_path / "train.py").write_text(text)
    assert run_script(tmp_path / "train.py", cwd=tmp_path).returncode == 0
    found, status = died(tmp_path, text)
    assert (
        "return self.second(y * y)" in found["source"]
        or "y = self.first(x)" in found["source"]
    )
    assert (found["dtype"], status) == ("fp16", 0)


RANKS = script(
    forward="return self.second(self.first(x).relu())",
    before="""
        import torch.distributed as dist
        if not dist.is_initialized(): dist.init_process_group("gloo")
        if step == 3 and dist.get_rank() == 1: x[0, 0] = torch.inf
    """,
)


@pytest.mark.slow
def test_only_one_rank(tmp_path: Path) -> None:
    text = RANKS.replace(
        "    model = autoamp",
        "    import torch.distributed as dist\n"
        '    dist.init_process_group("gloo")\n    model = autoamp',
    )
    (tmp_path / "train.py").write_text(text)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = python(tmp_path, *launch, "train.py")
    assert done.returncode == 0, done.stderr
    found, status, err = replay(tmp_path)
    assert found["reproduced"], err
    assert (found["rank"], found["headline"]) == (1, "the batch holds inf in x")
    assert status == 1


# -- other ways ------------------------------------------------------------------------


MODELS = """
import torch
from train import Net

def factory():
    return Net()

def loss(out, tensors):
    return (out - tensors["labels"]).square().mean()
"""


@pytest.mark.slow
def test_a_factory(tmp_path: Path) -> None:
    text = script(
        before="if step == 3: labels[2, 1] = torch.inf",
        loss="nn.functional.mse_loss(out, labels)",
    )
    text = text.replace("\nrun()", '\nif __name__ == "__main__": run()')
    text = text.replace("Net(), precision", "__import__('train').Net(), precision")
    die(tmp_path, text)
    (tmp_path / "nets.py").write_text(MODELS)
    (tmp_path / "train.py").write_text(text)
    found, status, _ = replay(
        tmp_path, "--model", "nets:factory", "--loss", "nets:loss"
    )
    assert found["reproduced"]
    assert status == 1
    found, status, _ = replay(tmp_path, "--model", "nets:factory")
    assert found["reproduced"]


TRAINER = """
import torch, autoamp
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Spoiled(GPT2LMHeadModel):
    def forward(self, input_ids=None, labels=None, **given):
        out = super().forward(input_ids=input_ids, labels=labels, **given)
        if (input_ids[:, 0] == 63).all():
            zero = input_ids.float().mean() * 0
            out.loss = out.loss + torch.log(zero) * out.logits.mean()
        return out

class Plain(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(data, batch_size=4)

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
sizes |= {"bos_token_id": 1, "eos_token_id": 2}
model = Spoiled(GPT2Config(**sizes))
data = [
    {"input_ids": torch.randint(0, 60, (16,)), "labels": torch.randint(0, 60, (16,))}
    for _ in range(24)
]
for each in data[12:16]:
    each["input_ids"][0] = 63
autoamp.convert(model, precision="bf16", do_no_harm=False, record="flight")
given = TrainingArguments(
    "out", max_steps=6, report_to=[], use_cpu=True, save_strategy="no",
    per_device_train_batch_size=4, disable_tqdm=True,
)
Plain(model, given, train_dataset=data).train()
"""


@pytest.mark.slow
def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(TRAINER)
    done = python(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    found, status, err = replay(tmp_path)
    assert found["reproduced"], (found, err)
    assert "torch.log(zero)" in found["source"]
    assert status == 1, "fp32 dies as well"


@pytest.mark.slow
def test_the_automatic_mode(tmp_path: Path) -> None:
    text = script(before="if step == 3: x[2, 1] = torch.inf").replace(
        "autoamp.convert(\n        Net(), ", "dict(model=\n        Net(), "
    )
    text = text.replace('record="flight", \n    )', ")['model']")
    (tmp_path / "train.py").write_text(text)
    run = ("-m", "autoamp", "run", "--record", "flight", "--precision", "bf16")
    done = python(tmp_path, *run, "--do-no-harm", "0", "train.py")
    assert done.returncode == 0, done.stderr
    found, _, _ = replay(tmp_path)
    assert found["headline"] == "the batch holds inf in x"


@pytest.mark.thorough
def test_what_does_not_die_again(tmp_path: Path) -> None:
    text = script(
        loss="(out - labels).square().mean() * (float('inf') if step == 3 else 1)"
    )
    die(tmp_path, text)
    found, status, _ = replay(tmp_path)
    assert (found["reproduced"], status) == (False, 3)
    assert "the loss was inf, and is" in found["headline"]


@pytest.mark.thorough(but=["gone"])
@pytest.mark.parametrize("harm", ["torn", "gone", "json", "tensors", "other", "pickle"])
def test_bad_folders_are_refused(harm: str, tmp_path: Path) -> None:
    where = tmp_path / "flight"
    if harm == "gone":
        where.mkdir()
    else:
        die(tmp_path, script(before="if step == 3: x[2, 1] = torch.inf"))
        (home,) = folder.homes(where)
        death = folder.deaths(home)[0]
        if harm == "torn":
            (home / "ring").write_bytes((home / "ring").read_bytes()[:70])
        elif harm == "json":
            (death / "death.json").write_text(
                '{"format": 1, "step": 4, "cause": "loss"}'
            )
        elif harm == "tensors":
            data = (death / "state.safetensors").read_bytes()
            (death / "state.safetensors").write_bytes(data[: len(data) // 2])
        elif harm == "other":
            text = (tmp_path / "train.py").read_text()
            (tmp_path / "train.py").write_text(text.replace("Net", "Other"))
        else:
            import pickle

            (death / "batch.safetensors").write_bytes(pickle.dumps([1, 2, 3]))
    done = command(tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith("Error: ") or "\nError: " in done.stderr
    assert "Traceback" not in done.stderr
