"""Every environment variable, with values that can be used and values that cannot."""

from __future__ import annotations

import os
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
from autoamp.rules import Rules

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
    "AUTOAMP_MASTERS": "fp32, off",
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
    ("AUTOAMP_MASTERS", "Off", {"masters": "off"}),
    ("AUTOAMP_RULES", "tensorflow", {"rules": "tensorflow"}),
    ("AUTOAMP_ALLOWLIST_ADD", "exp , aten::log,", {"allow": ("exp", "aten::log")}),
    ("AUTOAMP_INFERLIST_ADD", ",", {}),
    ("AUTOAMP_ALLOWLIST_REMOVE", "mm", {"unlist": (("allow", "mm"),)}),
    ("AUTOAMP_FUSE", "0", {"fuse": False}),
    ("AUTOAMP_UNFUSED", "gelu_tanh, rms_norm", {"unfused": ("gelu_tanh", "rms_norm")}),
]


@pytest.mark.parametrize(("name", "value", "options"), GOOD)
def test_good_values(name: str, value: str, options: dict[str, object]) -> None:
    assert read({name: value}) == Settings(Options(**options))


@pytest.mark.parametrize("name", ALL)
def test_empty_is_as_good_as_unset(name: str) -> None:
    for value in ("", "\t\n "):
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

NONSENSE = ["nonsense", "フロート", "nan", "\x07\x1b[31m", "fp64", "1 2", "x" * 10**5]


@pytest.mark.parametrize("name", WORDS)
def test_nonsense_where_words_are_expected(name: str) -> None:
    for value in NONSENSE:
        message = problem(**{name: value})
        assert message.startswith(f"{name}={value[:100]!r}"[:90])
        assert WORDS[name] in message


def test_loss_scales_that_are_no_scale() -> None:
    values = ["0", "-0.0", "-1", "inf", "-inf", "1e999", "1e-60", "infinity", "0x10"]
    for value in values:
        assert problem(AUTOAMP_LOSS_SCALE=value) == (
            f"AUTOAMP_LOSS_SCALE={value!r}: give {WORDS['AUTOAMP_LOSS_SCALE']}"
        )


@pytest.mark.parametrize("change", ["ADD", "REMOVE"])
@pytest.mark.parametrize("name", LISTS)
def test_names_that_are_no_op(name: str, change: str) -> None:
    variable, category = f"{name}_{change}", name[8:-4].lower()
    said = problem(**{variable: "expp"})
    assert said.startswith(
        f"{variable}='expp': {category}=expp: torch has no op aten::expp; "
        "did you mean aten::exp"
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"ALLOWLIST_REMOVE": "mm,softmax"},
            "softmax is not in the allow list; it is in the infer list",
        ),
        ({"DENYLIST_REMOVE": "bincount"}, "it is in no list"),
        ({"DENYLIST_ADD": "フ\x1b"}, "AUTOAMP_DENYLIST_ADD="),
        ({"INFERLIST_ADD": "mm," + "y" * 10**5}, "AUTOAMP_INFERLIST_ADD="),
        ({"CLEARLIST_REMOVE": "mm;bmm"}, "AUTOAMP_CLEARLIST_REMOVE="),
        (
            {"ALLOWLIST_ADD": "sum", "ALLOWLIST_REMOVE": "tanh"},
            "tanh is not in the allow list; it is in the infer list",
        ),
        (
            {"ALLOWLIST_ADD": "tanh,mm", "DENYLIST_ADD": "tanh"},
            "two lists, AUTOAMP_ALLOWLIST_ADD and AUTOAMP_DENYLIST_ADD; take it out of",
        ),
        (
            {"UNFUSED": "silu,gelu_tahn"},
            "'gelu_tahn', which is no kernel; did you mean 'gelu_tanh'?",
        ),
    ],
)
def test_what_lists_cannot_be(variables: dict[str, str], message: str) -> None:
    assert message in problem(**{f"AUTOAMP_{k}": v for k, v in variables.items()})


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


def test_a_list_by_its_old_name_is_pointed_to_its_new_one() -> None:
    old = {"WHITELIST": "ALLOWLIST", "GRAYLIST": "INFERLIST", "GREYLIST": "INFERLIST"}
    old |= {"BLACKLIST": "DENYLIST", "CLEARLISTT": "CLEARLIST"}
    for written, meant in old.items():
        for change in ("ADD", "REMOVE"):
            (sentence,) = remarks({f"AUTOAMP_{written}_{change}": "mm"})
            assert sentence.endswith(f"did you mean AUTOAMP_{meant}_{change}?")


def test_a_level_is_pointed_to_what_stands_for_it() -> None:
    (sentence,) = remarks({"AUTOAMP_LEVEL": "TENSOR_CORES_ONLY"})
    assert "AUTOAMP_PLACEMENT=forced" in sentence
    assert "TENSOR_CORES_ONLY" in Path("docs/automatic-mode.md").read_text("utf-8")


@pytest.mark.parametrize(("there", "elsewhere"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_an_op_listed_for_one_precision_is_not_for_the_other(
    there: str, elsewhere: str
) -> None:
    first, second = Rules.default(there), Rules.default(elsewhere)
    category, op = next(
        (category, op)
        for category in ("deny", "infer", "clear", "allow")
        for op in first.names(category)
        if not second.lists(category, op)
    )
    name = f"AUTOAMP_{category.upper()}LIST_REMOVE"
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read (No such file or directory)"),
        (lambda path: path.mkdir(), "cannot be read (Is a directory)"),
        (lambda path: path.write_text("[allow\n"), "not a TOML file"),
        (lambda path: path.write_text("#" * (2 << 20)), "a rules file has at most"),
    ],
    ids=["missing", "directory", "corrupt", "huge"],
)
def test_rules_files_that_cannot_be_used(
    make: Callable[[Path], object], message: str, tmp_path
) -> None:
    """Tests of rules files show more of what may be wrong with them."""
    path = tmp_path / "my.toml"
    make(path)
    found = problem(AUTOAMP_RULES=str(path))
    assert found.startswith(f"AUTOAMP_RULES='{path}'"[:100])
    assert message in found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_file_and_a_directory_without_permission(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.touch(mode=0)
    assert "cannot be read (Permission denied)" in problem(AUTOAMP_RULES=str(path))
    tmp_path.chmod(0o500)
    assert "Permission denied" in problem(AUTOAMP_REPORT_DIR=str(tmp_path / "below"))


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("/dev/stdin")])
def test_rules_from_what_is_no_file(path: Path, monkeypatch) -> None:
    """One never ends, the other waits for somebody to write."""

    def endless(path: Path) -> bytes:
        raise AssertionError(f"{path} is being read to its end")

    monkeypatch.setattr(Path, "read_bytes", endless)
    assert "cannot be read" in problem(AUTOAMP_RULES=str(path))


# -- the report directory --------------------------------------------------------------


def test_directories_that_cannot_be_written(tmp_path) -> None:
    file = tmp_path / "file"
    file.touch()
    below = ["/proc/x", "/proc", "~nosuchuser/x", "a" * 300, "/\x01" * 9000]
    for value in (str(file), f"{file}/below", *below):
        message = problem(AUTOAMP_REPORT_DIR=value)
        assert message.startswith("AUTOAMP_REPORT_DIR=")
        assert message.endswith("give a directory that can be written")


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
