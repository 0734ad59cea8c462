"""Hostile rules: files of any bytes, and no code ever run from data.

A rules file is read or refused with an error of ours that can be shown on a terminal.
"""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoamp
from autoamp import Rules
from autoamp.rules import parse
from tests.conformance.table import Figures

PACKAGE = Path(autoamp.__file__).parent
SECONDS = 30
"""The most that any file may take: a hundred times what the slowest does."""


def load(content: bytes, folder: Path) -> str:
    """What is said about a file of this content; "" where it is read."""
    path = folder / "hostile.toml"
    path.write_bytes(content)
    began = time.perf_counter()
    try:
        assert isinstance(Rules.load(path), Rules)
        said = ""
    except autoamp.RulesError as error:
        said = str(error)
        assert said.startswith(str(path))
        assert len(said) <= 4000
        assert said.replace("\n", "").isprintable()
    assert time.perf_counter() - began < SECONDS
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes(folder: Path, content: bytes) -> None:
    load(content, folder)


# -- nearly a rules file ---------------------------------------------------------------

words = st.sampled_from(
    ["mm", "aten::exp", "softmax", "sum.dim_IntList", "meta", "reason", "when", "test"]
) | st.text(max_size=6)
quoted = words.map(lambda w: '"' + w.replace("\\", "\\\\").replace('"', '\\"') + '"')
keys = st.sampled_from(["mm", "exp", "reason", "when", "allow", "dtype"]) | quoted
values = st.recursive(
    quoted
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(["true", "1979-05-27", "07:32:00", "inf", "-nan", "0x7f", "''"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: f"[{', '.join(v)}]")
        | st.lists(st.tuples(keys, inner), max_size=3).map(
            lambda v: "{" + ", ".join(f"{k} = {x}" for k, x in v) + "}"
        )
    ),
    max_leaves=6,
)
rules = st.fixed_dictionaries(
    {},
    optional={
        "reason": quoted,
        "restores": st.sampled_from(["true", "false", "1"]),
        "no_kernel": st.sampled_from(['["cpu"]', '"cpu"', "[1]", "[]"]),
        "fp32_operands": st.sampled_from(['["self"]', '["nothing"]', "{}"]),
        "when": st.sampled_from(
            [
                '[{test="reduces_at_least", value=9, category="deny", reason="x"}]',
                '[{test="device_is", value="", category="deny", reason="x"}]',
                "[{}]",
                "[[]]",
            ]
        ),
    },
).map(lambda d: "{" + ", ".join(f"{k} = {v}" for k, v in d.items()) + "}")
lines = (
    st.sampled_from(["[allow]", "[deny]", "[infer]", "[clear]", "[meta]", "[[deny]]"])
    | st.tuples(keys, values | rules).map(" = ".join)
    | st.tuples(st.sampled_from(["mm", "exp", "tanh"]), quoted | rules).map(" = ".join)
)


@settings(max_examples=400)
@given(st.lists(lines, max_size=8).map("\n".join))
def test_nearly_a_rules_file(folder: Path, text: str) -> None:
    load(text.encode("utf-8", "surrogatepass"), folder)


def test_fuzzed_files_are_read_and_refused_for_many_reasons(
    folder: Path, figures: Figures
) -> None:
    """Or the strategies above would test one line of the parser."""
    said: set[str] = set()

    @settings(max_examples=300, database=None)
    @given(st.lists(lines, max_size=3).map("\n".join))
    def gather(text: str) -> None:
        problem = load(text.encode("utf-8", "surrogatepass"), folder)
        said.add(problem.partition(": ")[2].rpartition(": ")[2][:12])

    gather()
    assert "" in said
    assert len(said) > 10
    figures.count("files", 1000)


# -- large and deep ones ---------------------------------------------------------------

MANY = 10**5
LARGE = {
    "an integer of 5000 digits": "[deny]\nmm = " + "9" * 5000,
    "a key of many parts": "a" + ".a" * MANY + " = 1",
    "a table of many parts": "[" + "a." * MANY + "a]",
    "a key of many parts with spaces": "[deny]\nmm" + " . x" * MANY + " = 1",
    "lists in lists": "x = " + "[" * MANY,
    "lists in lists, closed": "x = " + "[" * MANY + "]" * MANY,
    "tables in tables": "x = " + "{a = " * MANY,
    "many keys": "".join(f"k{i} = 1\n" for i in range(MANY // 2)),
    "many tables": "".join(f"[t{i}]\n" for i in range(MANY // 4)),
    "many ops": "[deny]\n" + "".join(f'op{i} = "x"\n' for i in range(MANY // 4)),
    "many conditions": "[deny]\nmm = {reason = 'x', when = [" + "{}, " * MANY + "]}",
    "a long name": f"[deny]\n{'a' * 5 * MANY} = 'x'",
    "too many bytes": "#" * (parse.MAX_BYTES + 1),
    "an escape in a name": '[deny]\n"\\u001b[31m\\u202emm" = "x"',
    "a private name": '[deny]\n"aten::__class__" = "x"\n"__init__.__globals__" = "x"',
}


@pytest.mark.parametrize("name", LARGE)
def test_large_and_deep_files_are_refused(
    name: str, folder: Path, figures: Figures
) -> None:
    assert load(LARGE[name].encode(), folder)
    figures.count("files")


def test_reasons_may_have_full_stops(folder: Path) -> None:
    text = "[deny]\nmm = " + '"' + "Thus. " * parse.MAX_DOTS + '"'
    assert load(text.encode(), folder) == ""


# -- nothing is executed ---------------------------------------------------------------

FORBIDDEN = {
    *("eval", "exec", "__import__", "os.system", "os.popen"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads"),
    *("shelve.open", "torch.load", "yaml.load", "runpy.run_path", "ctypes.CDLL"),
}


def calls_in(source: str) -> set[str]:
    """Dotted names of what is called; also by way of what was imported."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    found = set()
    for name in names:
        head, dot, rest = name.partition(".")
        found.add(known.get(head, head) + dot + rest)
    return found


def test_the_package_runs_no_code_from_data(figures: Figures) -> None:
    files = [*PACKAGE.rglob("*.py"), PACKAGE.parent / "autoamp_autoload.py"]
    assert len(files) > 80
    for file in files:
        assert not calls_in(file.read_text()) & FORBIDDEN, file
    figures.count("files of source", len(files))


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "import pickle as p\np.loads(b'')",
        "from torch import load\nload('x')",
        "f = exec",
    ],
)
def test_code_from_data_would_be_found(source: str) -> None:
    assert calls_in(source) & FORBIDDEN
