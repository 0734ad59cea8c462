"""What the tests of budgets look at inside of autoamp: the only imports of it."""

from __future__ import annotations

from autoamp.runtime import examine, stand_in
from autoamp.tools import budget
from autoamp.tools import budget_errors as sensitivity
from autoamp.tools import budget_search as search

examined = examine.examined
Heard, relative_error = stand_in.Heard, stand_in.relative_error
Budget, errors_of, parsed = budget.Budget, budget.errors_of, budget.parsed
Found, Scene = search.Found, search.Scene
Calibration, Squares = sensitivity.Calibration, sensitivity.Squares
