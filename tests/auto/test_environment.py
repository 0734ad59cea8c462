"""Every environment variable, with values that can be used and values that cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoamp import AutoampError
from autoamp.auto import environment
from autoamp.auto.environment import Settings, read, remarks
from autoamp.dtypes import parse_low_dtype
from autoamp.options import Options
from autoamp.rules.parse import MAX_BYTES

LISTS = [f"AUTOAMP_{c}LIST" for c in ("ALLOW", "DENY", "INFER", "CLEAR")]
WORDS = {
    "AUTOAMP_PRECISION": "auto, fp16, bf16",
    "AUTOAMP_LOSS_SCALE": "auto, dynamic, off or a positive finite number",
    "AUTOAMP_BACKEND": "eager, inductor",
    "AUTOAMP_PLACEMENT": "optimal, tensorflow, promote, forced",
    "AUTOAMP_DO_NO_HARM": "1, true, on, 0, false, off",
    "AUTOAMP_STRICT": "1, true, on, 0, false, off",
    "AUTOAMP_GUARD": "1, true, on, 0, false, off",
    "AUTOAMP_HEAL": "1, true, on, 0, false, off",
    "AUTOAMP_FUSE": "1, true, on, 0, false, off",
    "AUTOAMP_EXACT_CASTS": "1, true, on, 0, false, off",
    "AUTOAMP_CALIBRATE": "1, true, on, 0, false, off",
    "AUTOAMP_UNFUSED": "gelu, gelu_tanh, silu, mish, softmax",
    "AUTOAMP_WEIGHT_COPIES": "kept, every call",
}
ALL = [
    *WORDS,
    "AUTOAMP_LOCK",
    "AUTOAMP_RULES",
    "AUTOAMP_REPORT_DIR",
    "AUTOAMP_RECORD_DIR",
    *(f"{name}_{change}" for name in LISTS for change in ("ADD", "REMOVE")),
]


def problem(**variables: str) -> str:
    """The one line that says what is wrong with them."""
    with pytest.raises(AutoampError) as caught:
        read(variables)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500, "nobody reads more"
    return message


def test_the_variables_above_are_all_there_are() -> None:
    assert {*ALL, environment.ENABLE} == {
        *environment._VARIABLES,
        environment.ENABLE,
        environment.REPORT_DIR,
    }


# -- values that can be used -----------------------------------------------------------

GOOD = [
    ("AUTOAMP_PRECISION", "fp16", {"precision": "fp16"}),
    ("AUTOAMP_PRECISION", " BF16\n", {"precision": "bf16"}),
    ("AUTOAMP_PRECISION", "auto", {}),
    ("AUTOAMP_LOSS_SCALE", "Dynamic", {"loss_scale": "dynamic"}),
    ("AUTOAMP_LOSS_SCALE", "off", {"loss_scale": "off"}),
    ("AUTOAMP_LOSS_SCALE", "1e3", {"loss_scale": 1000.0}),
    ("AUTOAMP_LOSS_SCALE", "65536", {"loss_scale": 65536.0}),
    ("AUTOAMP_BACKEND", "Inductor", {"backend": "inductor"}),
    ("AUTOAMP_PLACEMENT", "TensorFlow ", {"placement": "tensorflow"}),
    ("AUTOAMP_PLACEMENT", "optimal", {}),
    ("AUTOAMP_DO_NO_HARM", "0", {"do_no_harm": False}),
    ("AUTOAMP_GUARD", "off", {"guard": False}),
    ("AUTOAMP_CALIBRATE", "0", {"calibrate": False}),
    ("AUTOAMP_DO_NO_HARM", "TRUE", {"do_no_harm": True}),
    ("AUTOAMP_STRICT", "on", {"strict": True}),
    ("AUTOAMP_STRICT", "off", {"strict": False}),
    ("AUTOAMP_WEIGHT_COPIES", "Every Call", {"weight_copies": "every call"}),
    ("AUTOAMP_RULES", "tensorflow", {"rules": "tensorflow"}),
    ("AUTOAMP_ALLOWLIST_ADD", "exp , aten::log,", {"allow": ("exp", "aten::log")}),
    ("AUTOAMP_INFERLIST_ADD", ",", {}),
    ("AUTOAMP_ALLOWLIST_REMOVE", "mm", {"unlist": (("allow", "mm"),)}),
]


@pytest.mark.parametrize(("name", "value", "options"), GOOD)
def test_good_values(name: str, value: str, options: dict[str, object]) -> None:
    assert read({name: value}) == Settings(Options(**options))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", ["", " ", "\t\n "])
def test_empty_is_as_good_as_unset(name: str, value: str) -> None:
    assert read({name: value}) == Settings(Options())


def test_all_at_once(tmp_path) -> None:
    rules = tmp_path / "my.toml"
    rules.write_text("[deny]\ntanh = 'mine'\n")
    found = read(
        {
            "AUTOAMP_ENABLE": "1",
            "AUTOAMP_PRECISION": "bf16",
            "AUTOAMP_RULES": str(rules),
            "AUTOAMP_INFERLIST_REMOVE": "softmax",
            "AUTOAMP_ALLOWLIST_REMOVE": "bmm",
            "AUTOAMP_ALLOWLIST_ADD": "softmax",
            "AUTOAMP_DO_NO_HARM": "0",
            "AUTOAMP_REPORT_DIR": str(tmp_path / "a" / "b"),
            "PATH": "nothing of ours",
        }
    )
    assert found.report_dir == (tmp_path / "a" / "b").resolve()
    assert [*found.report_dir.iterdir()] == [], "a trial file was left there"
    in_force = found.options.resolve_rules(torch.bfloat16)
    assert in_force.lists("deny", "tanh")
    assert in_force.lists("allow", "softmax")
    for category, op in (("infer", "softmax"), ("allow", "bmm")):
        assert not in_force.lists(category, op)


# -- values that cannot ----------------------------------------------------------------

NONSENSE = [
    "nonsense",
    "フロート",
    "-1",
    "nan",
    "\x07\x1b[31m",
    "fp32",
    "1 2",
    "x" * 10**5,
]


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("value", NONSENSE, ids=lambda v: ascii(v)[:12])
def test_nonsense_where_words_are_expected(name: str, value: str) -> None:
    message = problem(**{name: value})
    assert message.startswith(f"{name}={value[:100]!r}"[:90])
    assert WORDS[name] in message


@pytest.mark.parametrize(
    "value",
    ["0", "-0.0", "-65536", "inf", "-inf", "1e999", "1e-60", "infinity", "0x10"],
)
def test_loss_scales_that_are_no_scale(value: str) -> None:
    message = problem(AUTOAMP_LOSS_SCALE=value)
    assert message == (
        f"AUTOAMP_LOSS_SCALE={value!r}: give {WORDS['AUTOAMP_LOSS_SCALE']}"
    )


@pytest.mark.thorough(
    but=[
        "expp-ADD-AUTOAMP_ALLOWLIST",
        "\\u30d5-ADD-AUTOAMP_DENYLIST",
        "\\x1b-ADD-AUTOAMP_CLEARLIST",
        "mm;bmm-REMOVE-AUTOAMP_ALLOWLIST",
        "value4-REMOVE-AUTOAMP_INFERLIST",
        "-3-REMOVE-AUTOAMP_CLEARLIST",
    ]
)
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("change", ["ADD", "REMOVE"])
@pytest.mark.parametrize("value", ["expp", "フ", "\x1b", "mm;bmm", "y" * 10**5, "-3"])
def test_names_that_are_no_op(name: str, change: str, value: str) -> None:
    message = problem(
        **{f"{name}_{change}": f"mm,{value}" if value[0] == "y" else value}
    )
    assert message.startswith(f"{name}_{change}=")
    if value == "expp":
        assert "torch has no op aten::expp; did you mean aten::exp" in message


def test_an_op_that_is_not_in_the_list_it_is_taken_from() -> None:
    assert problem(AUTOAMP_ALLOWLIST_REMOVE="mm,softmax") == (
        "AUTOAMP_ALLOWLIST_REMOVE='mm,softmax': softmax is not in the allow list; "
        "it is in the infer list"
    )
    assert "it is in no list" in problem(AUTOAMP_DENYLIST_REMOVE="bincount")


def test_the_same_op_in_two_lists() -> None:
    message = problem(AUTOAMP_ALLOWLIST_ADD="tanh,mm", AUTOAMP_DENYLIST_ADD="tanh")
    assert message == (
        "AUTOAMP_DENYLIST_ADD='tanh': aten::tanh is in two lists, AUTOAMP_ALLOWLIST_ADD"
        " and AUTOAMP_DENYLIST_ADD; take it out of one of them"
    )


@pytest.mark.parametrize("category", ["allow", "deny", "infer", "clear"])
@pytest.mark.parametrize("change", ["ADD", "REMOVE"])
def test_a_wrong_name_is_told_of_the_list_it_was_given_for(
    category: str, change: str
) -> None:
    name = f"AUTOAMP_{category.upper()}LIST_{change}"
    assert problem(**{name: "expp"}).startswith(
        f"{name}='expp': {category}=expp: torch has no op aten::expp"
    )


# -- a list is its own, and what is added, less what is removed, as in TensorFlow ------


@pytest.mark.parametrize(
    ("variables", "category"),
    [
        ({"ALLOWLIST_ADD": "tanh"}, "allow"),
        ({"ALLOWLIST_ADD": "tanh", "ALLOWLIST_REMOVE": "tanh"}, "infer"),
        ({"ALLOWLIST_ADD": "aten.tanh", "ALLOWLIST_REMOVE": "aten::tanh"}, "infer"),
        ({"ALLOWLIST_ADD": "tanh,mm", "ALLOWLIST_REMOVE": "mm, tanh"}, "infer"),
        ({"ALLOWLIST_ADD": "tanh.default", "ALLOWLIST_REMOVE": "tanh"}, "infer"),
        ({"ALLOWLIST_ADD": "tanh", "INFERLIST_REMOVE": "tanh"}, "allow"),
        (
            {
                "ALLOWLIST_ADD": "tanh",
                "ALLOWLIST_REMOVE": "tanh",
                "DENYLIST_ADD": "tanh",
            },
            "deny",
        ),
        ({"INFERLIST_ADD": "tanh", "INFERLIST_REMOVE": "tanh"}, None),
        ({"INFERLIST_REMOVE": "tanh"}, None),
    ],
)
def test_what_is_removed_stays_removed(
    variables: dict[str, str], category: str | None
) -> None:
    for precision in ("fp16", "bf16"):
        given = {f"AUTOAMP_{k}": v for k, v in variables.items()}
        options = read({**given, "AUTOAMP_PRECISION": precision}).options
        low = parse_low_dtype(precision)
        assert low is not None
        rule = options.resolve_rules(low).lookup(torch.ops.aten.tanh.default)
        assert (None if rule is None else rule.category) == category


def test_what_was_never_there_cannot_be_removed() -> None:
    given = {"AUTOAMP_ALLOWLIST_ADD": "sum", "AUTOAMP_ALLOWLIST_REMOVE": "tanh"}
    assert "tanh is not in the allow list; it is in the infer list" in problem(**given)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("WHITELIST_ADD", "ALLOWLIST_ADD"),
        ("WHITELIST_REMOVE", "ALLOWLIST_REMOVE"),
        ("GRAYLIST_ADD", "INFERLIST_ADD"),
        ("GREYLIST_REMOVE", "INFERLIST_REMOVE"),
        ("BLACKLIST_ADD", "DENYLIST_ADD"),
        ("BLACKLIST_REMOVE", "DENYLIST_REMOVE"),
        ("CLEARLIST_ADDD", "CLEARLIST_ADD"),
        ("PLACMENT", "PLACEMENT"),
    ],
)
def test_a_list_by_its_old_name_is_pointed_to_its_new_one(
    written: str, meant: str
) -> None:
    (sentence,) = remarks({f"AUTOAMP_{written}": "mm"})
    assert sentence.endswith(f"did you mean AUTOAMP_{meant}?")


def test_a_level_is_pointed_to_what_stands_for_it() -> None:
    (sentence,) = remarks({"AUTOAMP_LEVEL": "TENSOR_CORES_ONLY"})
    assert "AUTOAMP_PLACEMENT=forced" in sentence
    assert "TENSOR_CORES_ONLY" in Path("docs/automatic-mode.md").read_text("utf-8")


def only_in(fp16: bool) -> tuple[str, str]:
    """A list and an op that is in it for one precision alone."""
    first, second = environment.Rules.default("fp16"), environment.Rules.default("bf16")
    if not fp16:
        first, second = second, first
    for category in ("deny", "infer", "clear", "allow"):
        for op in first.names(category):
            if not second.lists(category, op):
                return category, op
    pytest.skip("the lists of fp16 and bf16 are the same")


@pytest.mark.parametrize("fp16", [True, False])
def test_an_op_listed_for_one_precision_is_not_for_the_other(fp16: bool) -> None:
    category, op = only_in(fp16)
    name = f"AUTOAMP_{category.upper()}LIST_REMOVE"
    there, elsewhere = ("fp16", "bf16") if fp16 else ("bf16", "fp16")
    read({name: op, "AUTOAMP_PRECISION": there})
    read({name: op})
    message = problem(**{name: op, "AUTOAMP_PRECISION": elsewhere})
    assert f"is not in the {category} list" in message


def test_lists_are_those_with_the_rules_file_laid_over(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[deny]\nmm = 'mine'\n[meta]\ndtype = 'bfloat16'\n")
    given = {"AUTOAMP_RULES": str(path)}
    options = read({**given, "AUTOAMP_DENYLIST_REMOVE": "mm"}).options
    assert not options.resolve_rules(torch.bfloat16).lists("deny", "mm")
    given["AUTOAMP_PRECISION"] = "bf16"
    assert "it is in the deny list" in problem(**given, AUTOAMP_ALLOWLIST_REMOVE="mm")


# -- rules files -----------------------------------------------------------------------


def text(content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 << 20)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot be read (No such file or directory)"),
    "directory": (lambda path: path.mkdir(), "cannot be read (Is a directory)"),
    "not UTF-8": (text(b"[allow]\nexp = '\xff'\n"), "not a TOML file"),
    "corrupt": (text("[allow\n"), "not a TOML file"),
    "deep": (text("[allow]\nexp = " + "[" * 5000), "not a TOML file"),
    "contradictory": (text("[allow]\nexp='x'\n[deny]\nexp='y'\n"), "exp: named twice"),
    "wrong op": (text("[deny]\nexpp = 'x'\n"), "did you mean aten::exp"),
    "huge": (sparse, f"a rules file has at most {MAX_BYTES}"),
}


@pytest.mark.parametrize("kind", FILES)
def test_rules_files_that_cannot_be_used(kind: str, tmp_path) -> None:
    make, message = FILES[kind]
    path = tmp_path / "my.toml"
    make(path)
    found = problem(AUTOAMP_RULES=str(path))
    assert found.startswith(f"AUTOAMP_RULES='{path}'"[:100])
    assert message in found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_rules_file_without_permission(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.touch(mode=0)
    assert "cannot be read (Permission denied)" in problem(AUTOAMP_RULES=str(path))


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("/dev/stdin")])
def test_rules_from_what_is_no_file(path: Path, monkeypatch) -> None:
    """One never ends, the other waits for somebody to write."""

    def endless(path: Path) -> bytes:
        raise AssertionError(f"{path} is being read to its end")

    monkeypatch.setattr(Path, "read_bytes", endless)
    assert "cannot be read" in problem(AUTOAMP_RULES=str(path))


# -- the report directory --------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "{file}",
        "{file}/below",
        "/proc/x",
        "/proc",
        "~nosuchuser/x",
        "a" * 300,
        "/\x01" * 9000,
    ],
)
def test_directories_that_cannot_be_written(value: str, tmp_path) -> None:
    (tmp_path / "file").touch()
    message = problem(AUTOAMP_REPORT_DIR=value.format(file=tmp_path / "file"))
    assert message.startswith("AUTOAMP_REPORT_DIR=")
    assert message.endswith("give a directory that can be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_directory_without_permission(tmp_path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in problem(AUTOAMP_REPORT_DIR=str(tmp_path / "below"))


# -- whatever there is -----------------------------------------------------------------


def names_only(name: str) -> st.SearchStrategy[str]:
    """A directory is made where a report directory is named: only below /proc."""
    words = st.sampled_from(["auto", "mm", "bf16", "1", ",", "=", "~", "/", "::", "."])
    texts = st.text() | st.lists(words | st.text(max_size=3)).map("".join)
    if name in (environment.REPORT_DIR, "AUTOAMP_RECORD_DIR"):
        return texts.map(lambda t: "/proc/" + t.replace("..", ""))
    return texts.filter(lambda t: "/" not in t)


@pytest.mark.thorough
@settings(max_examples=120)
@given(st.sampled_from(ALL).flatmap(lambda n: st.tuples(st.just(n), names_only(n))))
def test_any_text_is_settings_or_a_line_that_names_the_variable(
    variable: tuple[str, str],
) -> None:
    name, value = variable
    said = ""
    try:
        assert isinstance(read({name: value}), Settings)
    except AutoampError as error:
        said = str(error)
    assert said.isprintable()
    assert name in said or not said


def test_variables_that_are_none_of_ours() -> None:
    assert remarks({"AUTOAMP_CACHE_DIR": "/tmp"}) == []
    assert remarks(
        {"AUTOAMP_PRECISON": "bf16", "HOME": "/", "AUTOAMP_ENABLE": "1"}
    ) == ["AUTOAMP_PRECISON is no variable of autoamp; did you mean AUTOAMP_PRECISION?"]
    (sentence,) = remarks({"AUTOAMP_" + "ZQ" * 10**5: ""})
    assert all(name in sentence for name in ALL)
    assert len(sentence) < 1000
    (sentence,) = remarks({"AUTOAMP_\x1b[31m\n": ""})
    assert sentence.startswith("AUTOAMP_\\x1b[31m\\n is no variable")
    (sentence,) = remarks({"AUTOAMP_ENABLE": "yes"})
    assert sentence.startswith("AUTOAMP_ENABLE='yes': give one of 1, true, on, 0")


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
x = torch.randn(2, 4)
exact = x @ model[0].weight.T + model[0].bias
for _ in range(2):
    assert torch.allclose(model[0](x), exact)
    model(x).sum().backward()
print("ran")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AUTOAMP_RULES", "AUTOAMP_REPORT_DIR"])
def test_script_runs_on_in_fp32_and_says_so_once(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "AUTOAMP_ENABLE": "1", name: "/proc/x\n\x1b[31m"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "ran\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("autoamp is off, everything runs in fp32: ")
    assert f"{name}='/proc/x\\n\\x1b[31m'" in line


def test_kernels_are_switched_off_by_name() -> None:
    assert read({"AUTOAMP_FUSE": "0"}).options.fuse is False
    assert read({"AUTOAMP_FUSE": "on"}).options.fuse is True
    named = read({"AUTOAMP_UNFUSED": "gelu_tanh, rms_norm"}).options
    assert (named.fuse, named.unfused) == (True, ("gelu_tanh", "rms_norm"))
    wrong = problem(AUTOAMP_UNFUSED="silu,gelu_tahn")
    assert "'gelu_tahn', which is no kernel; did you mean 'gelu_tanh'?" in wrong
