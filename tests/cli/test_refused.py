"""Command lines that are refused: the exit code, and what the one line of error names.

Nothing goes to stdout, no file is written, and no program is launched.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autoamp_cli import words
from tests.cli import calls
from tests.cli.calls import call
from tests.says import says

launched = calls.launched
BENCH = "--ways half --rounds 2 --steps 2"

ROWS: list[tuple[str, int, list[str]]] = [
    ("no-such-command", 2, ["no-such-command"]),
    # -- what was removed, with what to use
    ("plan transformers:gpt2", 2, ["plan", "removed", "autoamp explain"]),
    ("replay folder --model nets:small", 2, ["replay", "removed", "find_overflow"]),
    ("run --heal s.py", 2, ["--heal", "removed", "skipped steps"]),
    ("run --lock a.json s.py", 2, ["--lock", "removed", "diff OLD NEW"]),
    ("run --record folder s.py", 2, ["--record", "removed", "find_overflow"]),
    ("tune transformers:gpt2", 2, ["tune", "removed", "autoamp bench"]),
    ("explain nets:small --mesh dp=8", 2, ["--mesh", "removed", "--device"]),
    ("explain nets:small --mesh=dp=8", 2, ["--mesh", "removed", "--device"]),
    ("explain nets:small --mush dp=8", 2, ["No such option", "--mush"]),
    # -- run: the variables are read before a program takes this process's place
    ("run --precision fp8 s.py", 2, ["--precision='fp8'", "bf16"]),
    ("run --rules /proc/x s.py", 2, ["--rules=", "/proc/x"]),
    ("run --loss-scale nan s.py", 2, ["--loss-scale='nan'", "auto"]),
    ("run --report-dir /proc/x s.py", 2, ["--report-dir=", "/proc/x"]),
    ("run --denylist-remove expp s.py", 2, ["--denylist-remove='expp'"]),
    ("run --allow exp --deny exp s.py", 2, ["--allow and --deny"]),
    ("run --allow expp s.py", 2, ["expp", "did you mean aten::exp"]),
    ("run --unfused gelo s.py", 2, ["gelo", "did you mean 'gelu'"]),
    ("run --precison bf16 s.py", 2, ["--precison"]),
    ("run -x s.py", 2, ["-x"]),
    ("run --precision", 2, ["--precision", "argument"]),
    ("run", 2, ["SCRIPT"]),
    # -- what is no factory, with the line that raised
    ("explain nets", 2, ["nets", "module:factory"]),
    ("explain :small", 2, [":small", "module:factory"]),
    ("explain nosuchmodule:f", 2, ["nosuchmodule", "ModuleNotFoundError"]),
    ("explain broken:f", 2, ["broken", "division by zero", "broken.py:3"]),
    ("explain no_python:f", 2, ["no_python", "SyntaxError"]),
    ("explain nets:nosuch", 2, ["module nets has no nosuch"]),
    ("explain nets:constant", 2, ["nets:constant", "int", "(model,"]),
    ("explain nets:raises", 2, ["no weights\\x1b[2J here", "nets.py:"]),
    ("explain nets:leaves", 2, ["nets:leaves", "SystemExit: 0", "nets.py:"]),
    ("explain nets:takes", 2, ["nets:takes", "missing 1 required"]),
    ("explain nets:one", 2, ["nets:one", "Net", "(model, args)"]),
    ("explain nets:four", 2, ["nets:four", "tuple of 4"]),
    ("explain nets:no_model", 2, ["nets:no_model", "type as model", "Module"]),
    ("explain nets:no_tuple", 2, ["nets:no_tuple", "Tensor as args", "tuple"]),
    ("explain nets:no_dict", 2, ["nets:no_dict", "list as kwargs", "dict"]),
    ("explain nets:no_names", 2, ["nets:no_names", "key 3"]),
    (
        "explain nets:bad_shape --convert-anyway",
        2,
        ["nets:bad_shape", "RuntimeError", "nets.py:"],
    ),
    # -- explain
    ("explain nets:small --precision fp8", 2, ["--precision='fp8'", *words.PRECISIONS]),
    ("explain nets:small --device tpu", 2, ["tpu"]),
    ("explain nets:small --device gpu", 2, ["--device='gpu'", "'cuda'"]),
    ("explain nets:small --rules /no/such.toml", 2, ["/no/such.toml"]),
    ("explain nets:small --placement best", 2, ["--placement='best'", "forced"]),
    ("explain nets:small --json /no/such/a.json", 2, ["/no/such/a.json"]),
    (f"explain nets:small {calls.FORCED} --why exq", 2, ["exq", "did you mean exp"]),
    (f"explain nets:small {calls.FORCED} --why 7:exp", 2, ["7", "no such graph"]),
    # -- compare and diff
    ("compare nets:one", 2, ["nets:one"]),
    ("compare nets:small --to-rules a.toml", 2, ["--to-rules", "--tolerance"]),
    ("diff a.json", 2, ["NEW"]),
    ("diff . .", 2, ["it is a directory"]),
    # -- rules
    ("rules check .", 2, ["."]),
    ("rules check missing.toml", 2, ["missing.toml"]),
    ("rules check /dev/zero", 2, ["/dev/zero"]),
    ("rules check 'a\0b'", 2, []),
    ("rules list --category graylist", 2, ["graylist", *words.CATEGORIES]),
    ("rules why sofmtax", 2, ["aten::sofmtax", "did you mean aten::softmax"]),
    ("rules why 'a\x1b\0b'", 2, []),
    # -- export
    ("export nets:layers --out a.onnx", 2, [".pt2"]),
    ("export nets:layers --out no/a.pt2", 2, ["folder that exists"]),
    ("export nets:layers --out a.pt2 --target x", 2, ["x", *words.TARGETS]),
    ("export nets:branches --out a.pt2", 2, ["return y if y.sum() > 0 else -y"]),
    ("export nets:layers", 2, ["--out"]),
    # -- bench
    (f"bench nets:raises {BENCH}", 2, ["nets:raises", "ValueError: no weights"]),
    (f"bench nets:bad_shape {BENCH}", 2, ["RuntimeError: mat1 and mat2"]),
    (f"bench nets:too_large {BENCH}", 2, ["fp32", "batch 4"]),
    (f"bench nets:small {BENCH} --sweep 2,4", 2, ["removed", "--batch"]),
    ("bench nets:small --ways best", 2, ["best", *words.WAYS]),
    (f"bench nets:small {BENCH} --plot b.svg", 2, ["removed", "--json"]),
    (
        f"bench nets:small {BENCH} --inference --generate 3",
        2,
        ["--generate", "--inference"],
    ),
    (f"bench nets:small {BENCH} --json a --markdown a", 2, ["same place"]),
    ("bench nets:raises --json nowhere/b.json", 2, ["nowhere/b.json", "folder"]),
]


@pytest.mark.parametrize(("line", "code", "named"), ROWS, ids=[row[0] for row in ROWS])
def test_a_wrong_command_line_is_told_in_one_line(
    line: str,
    code: int,
    named: list[str],
    tmp_path: Path,
    launched: calls.Programs,
) -> None:
    before = sorted(tmp_path.iterdir())
    told = call(line)
    assert (told.exit_code, told.stdout, launched) == (code, "", [])
    assert isinstance(told.exception, SystemExit)
    lines = told.stderr.splitlines()
    starts = [n for n, text in enumerate(lines) if text.startswith("Error: ")]
    assert len(starts) == 1
    error = " ".join(" ".join(lines[starts[0] :]).split())
    says(error, "Error: ", *named)
    assert "\x1b" not in error
    left = [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"]
    assert left == before


def test_a_bad_variable_stops_a_run_as_an_option_does(
    launched: calls.Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOAMP_BACKEND", "nonsense")
    told = call("run script.py")
    assert (told.exit_code, launched) == (2, [])
    says(told.stderr, "AUTOAMP_BACKEND", "nonsense", option="eager")
