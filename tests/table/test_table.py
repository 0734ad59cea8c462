"""Every row of the table, in the usual options and in each of the others in turn."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests import table
from tests.quick import each_with_one
from tests.table import oracle
from tests.table.columns import COLUMNS, USUAL
from tests.table.rows import ROWS

for _module in pkgutil.iter_modules(table.__path__):
    if not _module.name.startswith("test_"):
        importlib.import_module(f"tests.table.{_module.name}")

OTHERS = [column for column in COLUMNS if column != USUAL]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_holds_every_law(name: str) -> None:
    oracle.check(ROWS[name], USUAL)


@pytest.mark.parametrize(("name", "column"), each_with_one([*ROWS], OTHERS))
def test_a_row_holds_every_law_in_other_options(name: str, column: str) -> None:
    if why := (ROWS[name].without or {}).get(column):
        pytest.skip(why)
    oracle.check(ROWS[name], column)
