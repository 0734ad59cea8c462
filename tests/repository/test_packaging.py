"""What ships: the rules inside wheel and sdist, found wherever the package is."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import yaml

import autoamp
from autoamp.passes.rules.model import builtin_path
from website.release import missing

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
RULES = sorted(path.name for path in (REPO / "rules").iterdir())


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command, which sees neither this checkout nor the network."""
    hidden = {"PYTHONPATH", "PYTHONHOME"}
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=REPO)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


def test_wheel_holds_the_package_and_the_rules(dist: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(dist[0]).namelist()
    assert {f"autoamp/_rules/{name}" for name in RULES} <= set(names)
    assert {"autoamp/py.typed", "autoamp_cli/py.typed"} <= set(names)
    tops = {name.partition("/")[0] for name in names}
    packages = {"autoamp", "autoamp_cli"}
    beside = {f"autoamp_{each}.py" for each in ("autoload", "said")}
    assert tops == {*packages, *beside, f"autoamp-{PROJECT['version']}.dist-info"}
    modules = {
        str(path.relative_to(REPO))
        for package in packages
        for path in (REPO / package).rglob("*.py")
    }
    modules |= beside
    assert modules == {name for name in names if name.endswith(".py")}
    others = {name.rpartition(".")[2] for name in names} - {"py"}
    # Types, rules and devices, the page and its licence, and the metadata of a wheel.
    texts = {"typed", "toml", "md", "css", "html", "js", "LICENSE", "txt"}
    metadata = {f"dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL")}
    assert others == texts | metadata | {"dist-info/licenses/LICENSE"}


def test_sdist_holds_what_a_build_and_a_test_run_need(dist: tuple[Path, Path]) -> None:
    with tarfile.open(dist[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"rules/{name}" for name in RULES} <= names
    assert {
        "CITATION.cff",
        "LICENSE",
        "Makefile",
        "README.md",
        "constraints.txt",
        "docs/how-it-works.md",
        "examples/demo.py",
        "pyproject.toml",
        "tests/conftest.py",
    } <= names


def test_wheel_built_from_the_sdist_is_the_same(
    dist: tuple[Path, Path], tmp_path
) -> None:
    wheel, sdist = dist
    with tarfile.open(sdist) as archive:
        # Python 3.11.4 and later ask for a filter.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safe)
    (source,) = tmp_path.iterdir()
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    run(*build, cwd=source)
    (again,) = tmp_path.glob("*.whl")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """An environment that holds, in name alone, the requirements less torch."""
    folder = tmp_path_factory.mktemp("others")
    venv.create(folder, with_pip=False)
    for requirement in PROJECT["dependencies"]:
        name, _, version = requirement.partition(">=")
        if name != "torch":
            pretend(folder, name, version)
    return folder


def pretend(environment: Path, name: str, version: str) -> Path:
    """Writes what pip reads of an installed distribution; gives the folder it is in."""
    (packages,) = environment.glob("lib/python*/site-packages")
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "")
    (info / "METADATA").write_text("\n".join(lines), "utf-8")
    return info


USERS_TORCH = {
    "2.11.0+cu128": True,
    "2.12.0a0+0a1b2c3.nv26.10": True,  # of a container
    "2.14.0.dev20261120+rocm7.1": True,  # of a night
    "2.10.0+cu128": False,
}
"""A version of torch, and whether it may stay."""


@pytest.mark.parametrize("version", USERS_TORCH)
def test_an_install_keeps_the_torch_that_is_there(
    version: str, dist: tuple[Path, Path], others: Path
) -> None:
    torch = pretend(others, "torch", version)
    try:
        # Isolated: a machine's settings of pip may name a folder of wheels.
        pip = [sys.executable, "-m", "pip", "--isolated", "--python"]
        ask = f"install --no-index --dry-run --quiet --report - {dist[0]}".split()
        pip += [str(others / "bin" / "python"), *ask]
        if not USERS_TORCH[version]:
            with pytest.raises(AssertionError, match="Cannot install autoamp"):
                run(*pip, cwd=others)
            return
        report = json.loads(run(*pip, cwd=others))
        assert [e["metadata"]["name"] for e in report["install"]] == ["autoamp"]
    finally:
        shutil.rmtree(torch)


@pytest.fixture(scope="module")
def editable(tmp_path_factory) -> Path:
    """A folder that holds what pip installs of an editable checkout."""
    folder = tmp_path_factory.mktemp("editable")
    code = "import sys, hatchling.build as b; b.build_editable(sys.argv[1])"
    run(sys.executable, "-c", code, folder, cwd=REPO)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_editable_install_leads_to_the_checkout(editable: Path, monkeypatch) -> None:
    """The quick one of two: what is imported is found, and not imported."""
    assert not (editable / "autoamp").exists(), "a second copy would go stale"
    monkeypatch.setattr(sys, "path", [])
    site.addsitedir(str(editable))
    found = PathFinder.find_spec("autoamp", sys.path)
    assert found is not None
    assert found.origin == str(REPO / "autoamp" / "__init__.py")
    assert autoamp.__file__ == found.origin, "these tests run on the checkout"
    assert builtin_path("bf16") == REPO / "rules" / "bf16.toml"


# -- what is said about versions is said once ------------------------------------------


def test_every_file_that_names_the_version_names_the_same() -> None:
    version = PROJECT["version"]
    assert autoamp.__version__ == version
    citation = (REPO / "CITATION.cff").read_text()
    changes = (REPO / "CHANGELOG.md").read_text()
    released = re.findall(r"^date-released: (\S+)$", citation, re.MULTILINE)
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [version]
    headings = re.findall(r"^## (\d.*)$", changes, re.MULTILINE)
    # Files that name a release together name none before its day.
    said = "Nothing is released yet" in (REPO / "README.md").read_text("utf-8")
    assert said is not bool(released)
    state = f" - {released[0]}" if released else ", not released yet"
    assert headings[0] == version + state


def pins(lines: list[str]) -> dict[str, str]:
    """Lower-case name to version of each `name==version`."""
    found = (line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==\S+", line))
    return {name.lower(): version for name, version in found}


CONSTRAINTS = pins((REPO / "constraints.txt").read_text().splitlines())


@pytest.mark.parametrize("extra", ["tests", "lint", "mutation", "docs", "zoo"])
def test_extras_pin_what_the_constraints_pin(extra: str) -> None:
    wanted = PROJECT["optional-dependencies"][extra]
    pinned = pins(wanted)
    assert len(pinned) == len(wanted), "every tool has an exact version"
    assert pinned == {name: CONSTRAINTS.get(name) for name in pinned}


def test_readme_names_the_versions_that_are_needed_and_tested() -> None:
    text = (REPO / "README.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (>=[\d.]+) \| ([\d.]+)", text, re.MULTILINE)
    declared = {"Python": PROJECT["requires-python"]}
    for requirement in PROJECT["dependencies"]:
        name, _, floor = requirement.partition(">=")
        declared[name] = f">={floor}"
    assert {name: needed for name, needed, _ in rows} == declared
    for name, _, tested in rows:
        assert name == "Python" or tested == CONSTRAINTS[name.lower()], name


def test_no_page_has_a_placeholder() -> None:
    pages = [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), REPO / "mkdocs.yml"]
    pages += [REPO / "pyproject.toml", REPO / "CITATION.cff"]
    pages += (REPO / ".github").rglob("*.yml")
    placeholder = re.compile(r"\b(ADDRESS|OWNER|TODO|example\.com)\b")
    named = {page.name: placeholder.findall(page.read_text("utf-8")) for page in pages}
    assert {name: words for name, words in named.items() if words} == {}


def test_a_release_is_told_what_it_lacks(tmp_path: Path) -> None:
    # Files of the test's own: those of the project change on the day of a release.
    bare = {
        "pyproject.toml": "[project]\nversion = '1.2.3'\n",
        "CITATION.cff": "version: 1.2.3\n",
        "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.2 - 2026-01-01\n",
        "README.md": "Nothing is released yet. [a](docs/a.md)\n",
    }
    filled = [
        ("pyproject.toml", "\n[project.urls]\nRepository = 'https://a/b'\n", ""),
        ("CITATION.cff", "repository-code: https://a/b\n", ""),
        ("CITATION.cff", "date-released: 2027-01-01\n", ""),
        ("CHANGELOG.md", "## 1.2.3 - 2027-01-01", "## Unreleased"),
        ("README.md", "", "Nothing is released yet."),
        ("README.md", "pip install autoamp", ""),
        ("README.md", "](https://a/docs/a.md)", "](docs/a.md)"),
    ]
    for name, text in bare.items():
        (tmp_path / name).write_text(text, "utf-8")
    for done, (name, new, old) in enumerate(filled):
        lacks = [*missing(tmp_path)]
        assert [lack.partition(":")[0] for lack in lacks] == [
            each for each, _, _ in filled[done:]
        ]
        text = (tmp_path / name).read_text("utf-8")
        text = text.replace(old, new) if old else text + new
        (tmp_path / name).write_text(text, "utf-8")
    assert [*missing(tmp_path)] == []


def test_the_oldest_torch_is_what_the_project_allows() -> None:
    (floor,) = (d for d in PROJECT["dependencies"] if d.startswith("torch>="))
    commands = run("make", "--dry-run", "OLDEST_VENV=nowhere", "test-oldest", cwd=REPO)
    wanted = floor.replace(">=", "==")
    assert f"s/^torch==.*/{wanted}/" in commands
    assert f"--constraint nowhere/constraints.txt '{wanted}'" in commands


# -- the forge runs what a person runs -------------------------------------------------

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text("utf-8"))
    for path in (REPO / ".github" / "workflows").glob("*.yml")
}


@pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no workflows")
def test_only_what_was_tested_is_published() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["publish"]["needs"] == ["test", "build"]
    assert jobs["test"]["uses"].endswith("/test.yml")
    may_sign = [name for name, job in jobs.items() if "permissions" in job]
    assert may_sign == ["publish"]
    pythons = WORKFLOWS["test"]["jobs"]["wheel"]["strategy"]["matrix"]["python"]
    named = {c.rpartition(" :: ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert named <= set(pythons)
