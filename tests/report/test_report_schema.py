"""The JSON of a report is as documented, and names nothing of one machine."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.small_models import Of

REPO = Path(__file__).resolve().parents[2]
DOCUMENT = REPO / "docs" / "report.schema.json"

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
ANY_KEY = ("regret", "graphs[].placements")
"""Objects whose keys are names, written `*` in `documented`."""


def documented() -> dict[str, tuple[type, ...]]:
    """Each key of the schema to its types; `[]` stands for each entry of a list."""
    return dict(keys(json.loads(DOCUMENT.read_text(encoding="utf-8"))))


def keys(schema: Any, path: str = "") -> Iterator[tuple[str, tuple[type, ...]]]:
    """Every key below an object of the schema; each has a meaning and a type."""
    for name, each in schema.get("properties", {}).items():
        yield from key_of(each, f"{path}.{name}" if path else name)
    if each := schema.get("additionalProperties"):
        yield from key_of(each, f"{path}.*")


def key_of(schema: Any, path: str) -> Iterator[tuple[str, tuple[type, ...]]]:
    assert schema["description"], path
    kinds = schema["type"]
    names = kinds if isinstance(kinds, list) else [kinds]
    yield path, tuple(found for name in names for found in TYPES[name])
    yield from keys(schema, path)
    yield from keys(schema.get("items", {}), f"{path}[]")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its key, as `documented` writes keys."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, each in value.items():
            name = "*" if path in ANY_KEY else key
            yield from leaves(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict):
                yield from leaves(each, f"{path}[]")


def reports() -> list[autoamp.Report]:
    """A training run in fp16 with a checkpoint, a report of `explain`, a plain one."""
    torch.manual_seed(0)
    model = Of(
        lambda m, x: checkpoint(m.body, m.fc(x), use_reentrant=False).exp().sum(),
        fc=nn.Linear(8, 8),
        body=nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    )
    given: dict[str, Any] = {"do_no_harm": False, "precision": "fp16"}
    autoamp.convert(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    model(torch.ones(4, 8)).backward()
    small = nn.Sequential(nn.Linear(8, 8))
    told = autoamp.explain(small, torch.ones(2, 8), device="cuda:sm_90")
    kept = autoamp.convert(nn.Linear(8, 8), precision="bf16", keep="*")
    kept(torch.ones(2, 8))
    half = nn.Linear(8, 8).bfloat16()
    steps = torch.optim.SGD(half.parameters(), lr=0.1)
    autoamp.convert(half, steps, masters="off")
    for _ in range(2):  # updates are looked at from the second step on
        half(torch.ones(2, 8).bfloat16()).sum().backward()
        steps.step()
    converted = map(autoamp.report, (model, kept, half))
    return [told, *converted]


def faults(document: Any, schema: dict[str, tuple[type, ...]]) -> list[str]:
    """The keys that are not in the schema, and the values that have another type."""
    found = []
    for path, value in leaves(document):
        if path.endswith("[]"):
            continue
        if path not in schema:
            found.append(f"{path} is not documented")
        elif isinstance(value, bool) and bool not in schema[path]:
            found.append(f"{path} is a boolean")
        elif not isinstance(value, schema[path]):
            found.append(f"{path} is {value!r}")
    return found


def test_every_key_is_documented_with_its_type(tmp_path: Path) -> None:
    schema = documented()
    met: set[str] = set()
    for number, report in enumerate(reports()):
        path = tmp_path / f"{number}.json"
        document = json.loads(report.to_json(path))
        assert faults(document, schema) == []
        met |= {key for key, _ in leaves(document)}
        assert json.loads(path.read_text("utf-8")) == document
    assert set(schema) - met == set(), "documented, and never written"


def test_an_undocumented_key_and_a_wrong_type_are_found() -> None:
    schema = documented()
    document = json.loads(reports()[0].to_json())
    document["cost"] = True
    document["ops"][0]["category"] = None
    document["ops"][0]["extra"] = 1
    assert faults(document, schema) == [
        "cost is a boolean",
        "ops[].category is None",
        "ops[].extra is not documented",
    ]


def told(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    given = {"precision": "bf16", **options}
    return json.loads(autoamp.explain(model, x, **given, device="cuda:sm_90").to_json())


def test_the_costs_of_ops_and_casts_add_up_to_the_predicted_time() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    x = torch.ones(4096, 512)
    high, low = told(model, x, keep=["*"]), told(model, x)
    assert sum(op["cost_fp32"] for op in high["ops"]) == high["cost"]
    assert high["headline"]["seconds"] == pytest.approx(high["cost"] * 1e-10)
    of_ops = sum(
        op["cost_fp32" if op["precision"] == "fp32" else "cost_low"]
        for op in low["ops"]
    )
    assert 0 < of_ops < low["cost"] < high["cost"], "the rest are casts"


def test_the_reward_for_low_ops_is_no_cost_of_theirs() -> None:
    model, x = nn.Linear(64, 64), torch.ones(64, 64)
    forced, priced = told(model, x, do_no_harm=False), told(model, x)
    assert forced["graphs"][0]["reward_per_allow_op"] > 0
    for key in ("cost_fp32", "cost_low"):
        assert forced["ops"][0][key] == priced["ops"][0][key] > 0


# -- nothing of one machine ---------------------------------------------------------


def test_a_report_names_no_folder_and_no_address_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places in the user's code and in packages are kept without their folders."""
    package = tmp_path / "site-packages" / "planted_package"
    package.mkdir(parents=True)
    (package / "a.py").write_text("def steep(x):\n    return x.exp()\n")
    monkeypatch.syspath_prepend(package.parent)
    steep = importlib.import_module("planted_package.a").steep
    kept = Of(lambda m, x: steep(m.layer(x)), layer=nn.Linear(8, 8))
    text = autoamp.explain(kept, torch.ones(2, 8), device="cuda:sm_90").to_json()
    places = {op["source"].partition(":")[0] for op in json.loads(text)["ops"]}
    assert places <= {"planted_package/a.py", "a.py", "test_report_schema.py"}
    assert len(places) == 2
    for folder in (REPO, tmp_path, Path(torch.__file__).parents[1]):
        assert str(folder) not in text
    assert not re.search(r"\b0x[0-9a-f]{4,}", text)
