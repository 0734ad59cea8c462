"""Every environment variable, with values that can be used and values that cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autoamp
from autoamp.auto import environment
from tests.says import says

LISTS = [f"AUTOAMP_{c}LIST" for c in ("ALLOW", "DENY", "INFER", "CLEAR")]
SWITCH = "1, true, on, 0, false, off"
WORDS = {
    "AUTOAMP_PRECISION": "auto, fp16, bf16",
    "AUTOAMP_LOSS_SCALE": "auto, dynamic, off or a positive finite number",
    "AUTOAMP_BACKEND": "eager, inductor",
    "AUTOAMP_PLACEMENT": "optimal, tensorflow, promote, forced",
    "AUTOAMP_UNFUSED": "gelu, gelu_tanh, silu, mish, softmax",
    "AUTOAMP_WEIGHT_COPIES": "kept, every call",
    **{
        f"AUTOAMP_{name}": SWITCH
        for name in (
            *("DO_NO_HARM", "STRICT", "GUARD"),
            *("FUSE", "EXACT_CASTS", "CALIBRATE"),
        )
    },
}
ALL = [
    *WORDS,
    "AUTOAMP_RULES",
    "AUTOAMP_REPORT_DIR",
    *(f"{name}_{change}" for name in LISTS for change in ("ADD", "REMOVE")),
]


def read(**variables: str) -> Any:
    """The options that variables stand for, given without the prefix of their names."""
    return environment.read({f"AUTOAMP_{k}": v for k, v in variables.items()}).options


def problem(**variables: str) -> str:
    """The one line that says what is wrong with them."""
    with pytest.raises(autoamp.AutoampError) as caught:
        read(**variables)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500, "nobody reads more"
    return message


# -- values that can be used -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("PRECISION", "fp16", {"precision": "fp16"}),
        ("PRECISION", " BF16\n", {"precision": "bf16"}),
        ("PRECISION", "auto", {"precision": "auto"}),
        ("LOSS_SCALE", "Dynamic", {"loss_scale": "dynamic"}),
        ("LOSS_SCALE", "off", {"loss_scale": "off"}),
        ("LOSS_SCALE", "1e3", {"loss_scale": 1000.0}),
        ("BACKEND", "Inductor", {"backend": "inductor"}),
        ("PLACEMENT", "TensorFlow ", {"placement": "tensorflow"}),
        ("DO_NO_HARM", "0", {"do_no_harm": False}),
        ("DO_NO_HARM", "TRUE", {"do_no_harm": True}),
        ("GUARD", "off", {"guard": False}),
        ("CALIBRATE", "0", {"calibrate": False}),
        ("STRICT", "on", {"strict": True}),
        ("EXACT_CASTS", "1", {"exact_casts": True}),
        ("WEIGHT_COPIES", "Every Call", {"weight_copies": "every call"}),
        ("RULES", "tensorflow", {"rules": "tensorflow"}),
        ("ALLOWLIST_ADD", "exp , aten::log,", {"allow": ("exp", "aten::log")}),
        ("INFERLIST_ADD", ",", {"infer": ()}),
        ("ALLOWLIST_REMOVE", "mm", {"unlist": (("allow", "mm"),)}),
        ("FUSE", "0", {"fuse": False}),
        ("UNFUSED", "gelu_tanh, rms_norm", {"kernels_off": ("gelu_tanh", "rms_norm")}),
    ],
)
def test_good_values(name: str, value: str, options: dict[str, object]) -> None:
    found = read(**{name: value})
    assert {key: getattr(found, key) for key in options} == options


@pytest.mark.parametrize("name", ALL)
def test_empty_is_as_good_as_unset(name: str) -> None:
    for value in ("", "\t\n "):
        assert environment.read({name: value}) == environment.read({})


def test_all_at_once(tmp_path: Path) -> None:
    rules = tmp_path / "my.toml"
    rules.write_text("[deny]\ntanh = 'mine'\n")
    given = {
        "AUTOAMP_ENABLE": "1",
        "AUTOAMP_PRECISION": "bf16",
        "AUTOAMP_RULES": str(rules),
        "AUTOAMP_INFERLIST_REMOVE": "softmax",
        "AUTOAMP_ALLOWLIST_REMOVE": "bmm",
        "AUTOAMP_ALLOWLIST_ADD": "softmax",
        "AUTOAMP_REPORT_DIR": str(tmp_path / "a" / "b"),
        "PATH": "nothing of ours",
    }
    found = environment.read(given)
    assert found.report_dir == (tmp_path / "a" / "b").resolve()
    assert [*found.report_dir.iterdir()] == [], "a trial file was left there"
    in_force = found.options.resolve_rules(torch.bfloat16)
    listed = {"deny": "tanh", "allow": "softmax"}
    assert all(in_force.lists(*pair) for pair in listed.items())
    assert not any(
        in_force.lists(*p) for p in {"infer": "softmax", "allow": "bmm"}.items()
    )


# -- values that cannot ----------------------------------------------------------------


@pytest.mark.parametrize("name", WORDS)
def test_nonsense_where_words_are_expected(name: str) -> None:
    nonsense = ["フロート", "nan", "\x07\x1b[31m", "fp64", "1 2", "x" * 10**5]
    scales = ["0", "-0.0", "-1", "inf", "1e999", "1e-60", "infinity", "0x10"]
    for value in nonsense + (scales if name == "AUTOAMP_LOSS_SCALE" else []):
        said = problem(**{name.removeprefix("AUTOAMP_"): value})
        says(said, f"{name}={value[:100]!r}"[:90], option=WORDS[name])


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        *(({f"{n[8:]}_ADD": "expp"}, [f"{n}_ADD='expp'", "aten::exp"]) for n in LISTS),
        ({"ALLOWLIST_REMOVE": "mm,softmax"}, ["softmax", "infer list"]),
        ({"DENYLIST_REMOVE": "bincount"}, ["bincount", "no list"]),
        ({"DENYLIST_ADD": "フ\x1b"}, ["AUTOAMP_DENYLIST_ADD="]),
        ({"INFERLIST_ADD": "mm," + "y" * 10**5}, ["AUTOAMP_INFERLIST_ADD="]),
        ({"CLEARLIST_REMOVE": "mm;bmm"}, ["AUTOAMP_CLEARLIST_REMOVE="]),
        ({"ALLOWLIST_ADD": "sum", "ALLOWLIST_REMOVE": "tanh"}, ["tanh", "infer list"]),
        (
            {"ALLOWLIST_ADD": "tanh,mm", "DENYLIST_ADD": "tanh"},
            ["AUTOAMP_ALLOWLIST_ADD", "AUTOAMP_DENYLIST_ADD"],
        ),
        ({"UNFUSED": "silu,gelu_tahn"}, ["'gelu_tahn'", "'gelu_tanh'"]),
        # An op that is listed for one precision is not for the other.
        ({"RULES": "/no/file", "ALLOWLIST_REMOVE": "my::op"}, ["AUTOAMP_RULES="]),
    ],
    ids=lambda given: ",".join(given)[:40],
)
def test_lists_that_cannot_be(variables: dict[str, str], named: list[str]) -> None:
    said = problem(**variables)
    says(said, *named)
    # What a rules file that cannot be read would list is not called wrong.
    assert "RULES" not in variables or "ALLOWLIST" not in said


def test_every_bad_variable_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = {
        "PRECISION": "fp8",
        "LOSS_SCALE": "-1",
        "STRICT": "maybe",
        "REPORT_DIR": str(tmp_path / "file" / "below"),
        "DENYLIST_ADD": "no_such_op_at_all",
    }
    said = problem(**bad, PRECISON="bf16", BACKEND="eager")
    says(said, *(f"AUTOAMP_{name}=" for name in bad), "AUTOAMP_PRECISON is no variable")
    assert "AUTOAMP_BACKEND" not in said


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
        ({"INFERLIST_ADD": "tanh", "INFERLIST_REMOVE": "tanh"}, None),
        ({"INFERLIST_REMOVE": "tanh"}, None),
    ],
)
def test_what_is_removed_stays_removed(
    variables: dict[str, str], category: str | None
) -> None:
    for precision, low in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        rules = read(**variables, PRECISION=precision).resolve_rules(low)
        rule = rules.lookup(torch.ops.aten.tanh.default)
        assert (None if rule is None else rule.category) == category


@pytest.mark.parametrize(("there", "elsewhere"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_an_op_listed_for_one_precision_is_not_for_the_other(
    there: str, elsewhere: str
) -> None:
    first, second = autoamp.Rules.default(there), autoamp.Rules.default(elsewhere)
    category, op = next(
        (category, op)
        for category in ("deny", "infer", "clear", "allow")
        for op in first.names(category)
        if not second.lists(category, op)
    )
    removed = {f"{category.upper()}LIST_REMOVE": op}
    read(**removed, PRECISION=there)
    read(**removed)
    says(problem(**removed, PRECISION=elsewhere), f"{category} list")


def test_lists_are_those_with_the_rules_file_laid_over(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[deny]\nmm = 'mine'\n[meta]\ndtype = 'bfloat16'\n")
    options = read(RULES=str(path), DENYLIST_REMOVE="mm")
    assert not options.resolve_rules(torch.bfloat16).lists("deny", "mm")
    given = {"RULES": str(path), "PRECISION": "bf16", "ALLOWLIST_REMOVE": "mm"}
    says(problem(**given), "deny list")


# -- files and directories -------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_text("[allow\n"), "TOML"),
        (lambda path: path.write_text("#" * (2 << 20)), "at most"),
    ],
    ids=["missing", "directory", "corrupt", "huge"],
)
def test_rules_files_that_cannot_be_used(
    make: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    """Tests of rules files show more of what may be wrong with them."""
    path = tmp_path / "my.toml"
    make(path)
    says(problem(RULES=str(path)), f"AUTOAMP_RULES='{path}'"[:100], why)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_file_and_a_directory_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.touch(mode=0)
    says(problem(RULES=str(path)), "Permission denied")
    tmp_path.chmod(0o500)
    says(problem(REPORT_DIR=str(tmp_path / "below")), "Permission denied")


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("/dev/stdin")])
def test_rules_from_what_is_no_file(path: Path, monkeypatch) -> None:
    """One never ends, the other waits for somebody to write."""

    def endless(path: Path) -> bytes:
        raise AssertionError(f"{path} is being read to its end")

    monkeypatch.setattr(Path, "read_bytes", endless)
    says(problem(RULES=str(path)), str(path))


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    below = ["/proc/x", "/proc", "~nosuchuser/x", "a" * 300, "/\x01" * 9000]
    for value in (str(file), f"{file}/below", *below):
        says(problem(REPORT_DIR=value), "AUTOAMP_REPORT_DIR=", option="can be written")


# -- whatever there is -----------------------------------------------------------------


def names_only(name: str) -> st.SearchStrategy[str]:
    """A directory is made where a report directory is named: only below /proc."""
    words = st.sampled_from(["auto", "mm", "bf16", "1", ",", "=", "~", "/", "::", "."])
    texts = st.text() | st.lists(words | st.text(max_size=3)).map("".join)
    if name == "AUTOAMP_REPORT_DIR":
        return texts.map(lambda t: "/proc/" + t.replace("..", ""))
    return texts.filter(lambda t: "/" not in t)


@settings(max_examples=120)
@given(st.sampled_from(ALL).flatmap(lambda n: st.tuples(st.just(n), names_only(n))))
def test_any_text_is_settings_or_a_line_that_names_the_variable(
    variable: tuple[str, str],
) -> None:
    said = ""
    try:
        environment.read(dict([variable]))
    except autoamp.AutoampError as error:
        said = str(error)
    assert said.isprintable()
    assert variable[0] in said or not said


@pytest.mark.parametrize(
    ("variable", "named"),
    [
        ("PRECISON", ["AUTOAMP_PRECISON", "AUTOAMP_PRECISION"]),
        ("WHITELIST_ADD", ["AUTOAMP_ALLOWLIST_ADD"]),
        ("GRAYLIST_REMOVE", ["AUTOAMP_INFERLIST_REMOVE"]),
        ("GREYLIST_ADD", ["AUTOAMP_INFERLIST_ADD"]),
        ("BLACKLIST_ADD", ["AUTOAMP_DENYLIST_ADD"]),
        ("CLEARLISTT_REMOVE", ["AUTOAMP_CLEARLIST_REMOVE"]),
        ("LEVEL", ["AUTOAMP_PLACEMENT=forced", "TENSOR_CORES_ONLY"]),
        ("ZQ" * 10**5, ALL),
        ("\x1b[31m\n", ["AUTOAMP_\\x1b[31m\\n"]),
        ("ENABLE", ["AUTOAMP_ENABLE='yes'", "1, true, on, 0"]),
    ],
    ids=lambda given: ascii(given)[:20],
)
def test_a_variable_that_is_none_of_ours_is_pointed_to_the_one_that_is(
    variable: str, named: list[str]
) -> None:
    (sentence,) = environment.remarks({f"AUTOAMP_{variable}": "yes", "HOME": "/"})
    says(sentence, *named)
    assert len(sentence) < 1000


def test_the_bare_name_is_pointed_to_the_switch() -> None:
    (sentence,) = environment.remarks({"AUTOAMP": "1", "AUTOAMPLIFIER": "1"})
    says(sentence, "AUTOAMP ", "AUTOAMP_ENABLE?")


def test_a_variable_that_was_removed_says_what_to_use() -> None:
    (sentence,) = environment.remarks({"AUTOAMP_RECORD_DIR": "folder"})
    says(sentence, "AUTOAMP_RECORD_DIR", "removed", "autoamp.find_overflow")


def test_what_others_read_is_not_remarked_on() -> None:
    assert environment.remarks({"AUTOAMP_CACHE_DIR": "/tmp"}) == []
    assert "TENSOR_CORES_ONLY" in Path("docs/automatic-mode.md").read_text("utf-8")
