"""Every row of the table, in the usual options and in each of the others in turn."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests import table
from tests.quick import each_with_one, some_slow
from tests.table import oracle
from tests.table.columns import AS_SAID, COLUMNS, USUAL
from tests.table.rows import ROWS

for _module in pkgutil.iter_modules(table.__path__):
    if not _module.name.startswith("test_"):
        importlib.import_module(f"tests.table.{_module.name}")

OTHERS = [column for column in COLUMNS if column != USUAL]
IN_TURN = each_with_one([*ROWS], OTHERS)
RUN_AS_SAID = {
    name
    for name, column in (each.values for each in IN_TURN if not each.marks)
    if column in AS_SAID and column not in (ROWS[name].without or {})
}
"""Rows whose ops are known to run as the row says from another column that CI has."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", some_slow(ROWS, RUN_AS_SAID.__contains__))
def test_a_row_holds_every_law(name: str) -> None:
    """CI has each row in a column where its ops run as it says, here or below."""
    oracle.check(ROWS[name], USUAL)


@pytest.mark.parametrize(("name", "column"), IN_TURN)
def test_a_row_holds_every_law_in_other_options(name: str, column: str) -> None:
    """CI has each row in one column, in turn, and so each column in a few rows."""
    if why := (ROWS[name].without or {}).get(column):
        pytest.skip(why)
    oracle.check(ROWS[name], column)
