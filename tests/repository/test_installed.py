"""The wheel in an empty environment; what the package imports is what it declares."""

from __future__ import annotations

import ast
import re
import sys
import venv
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

from tests.repository.test_packaging import PROJECT, REPO, run

SHIPPED = [
    "autoamp",
    "autoamp_cli",
    "autoamp_autoload.py",
    "autoamp_said.py",
]
GUARDED = {
    "onnx": ("onnx", "tools/export_targets.py"),
}
"""A module that may be missing, the extra that brings it, and the file that says so."""

NAMED = {"transformers": "tools/named_transformers.py", "accelerate": "trainers.py"}
"""A library that is imported where a user names one of its models, or asks for a hook
into it, and the file that says how to install the library where it is missing."""


def name_of(requirement: str) -> str:
    """`networkx` of `networkx>=3`."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0]


# -- the wheel where nothing else is ---------------------------------------------------


def required(names: list[str]) -> dict[str, metadata.Distribution]:
    """The distributions called `names`, and what they require here without extras."""
    found: dict[str, metadata.Distribution] = {}
    todo = [*names]
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        wanted = found[name].requires or []
        todo += [name_of(line) for line in wanted if "extra ==" not in line]
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Puts links to the files of an installed distribution into the folder `site`."""
    tops = {PurePosixPath(file).parts[0] for file in distribution.files or ()}
    for top in tops - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The Python of an environment that holds what autoamp requires, and no more.

    The files of the requirements are links to those of the running Python, so that
    nothing is fetched.
    """
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", code, cwd=tmp_path).strip())
    needed = [name_of(requirement) for requirement in PROJECT["dependencies"]]
    for distribution in required(needed).values():
        link(distribution, site)
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_where_nothing_else_is(empty: Path, tmp_path: Path) -> None:
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    run(*build, cwd=REPO)
    (wheel,) = tmp_path.glob("*.whl")
    # Without --no-deps: pip refuses, without the network, if a requirement is missing.
    run(empty, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    lacking = "import importlib.util as u; print(u.find_spec('numpy'))"
    assert run(empty, "-c", lacking, cwd=tmp_path).strip() == "None"
    script = tmp_path / "installed.py"
    script.write_text(
        (REPO / "tests" / "repository" / "installed.py").read_text("utf-8"), "utf-8"
    )
    told = run(empty, "-P", script, cwd=tmp_path)
    assert "a model is explained" in told


# -- whose modules the package imports -------------------------------------------------


def others_imported(tree: ast.AST) -> set[str]:
    """The top names of imports that are neither Python's nor the project's own.

    A name in `import_module("name")` counts.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            first = node.args[0]
            found |= {first.value} if isinstance(first, ast.Constant) else set()
    own = {Path(name).stem for name in SHIPPED}
    return {n.partition(".")[0] for n in found} - set(sys.stdlib_module_names) - own


def shipped() -> set[str]:
    files = [
        file
        for name in SHIPPED
        for file in ((REPO / name).rglob("*.py") if "." not in name else [REPO / name])
    ]
    trees = (ast.parse(file.read_text("utf-8"), str(file)) for file in files)
    return set().union(*map(others_imported, trees))


def test_imports_of_others_are_the_declared_requirements() -> None:
    declared = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert shipped() - GUARDED.keys() - NAMED.keys() == declared


@pytest.mark.parametrize("library", NAMED)
def test_a_library_that_a_user_names_may_be_missing(library: str) -> None:
    text = (REPO / "autoamp" / NAMED[library]).read_text("utf-8")
    assert f"{library} is not installed (pip install {library})" in text


def test_what_may_be_missing_is_in_the_extra_that_the_error_names() -> None:
    providers = metadata.packages_distributions()
    for module, (extra, file) in GUARDED.items():
        assert module in shipped()
        wanted = {name_of(d) for d in PROJECT["optional-dependencies"][extra]}
        assert module not in providers or wanted & set(providers[module])
        text = (REPO / "autoamp" / file).read_text("utf-8")
        assert f"pip install 'autoamp[{extra}]'" in text
