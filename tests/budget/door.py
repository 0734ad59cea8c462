"""What the tests of budgets look at inside of autoamp: the only imports of it."""

from __future__ import annotations

from autoamp.ask import examine, stand_in
from autoamp.budget import budget, search, sensitivity

examined = examine.examined
Heard, relative_error = stand_in.Heard, stand_in.relative_error
Budget, errors_of, parsed = budget.Budget, budget.errors_of, budget.parsed
Found, Scene = search.Found, search.Scene
Calibration, Squares = sensitivity.Calibration, sensitivity.Squares
