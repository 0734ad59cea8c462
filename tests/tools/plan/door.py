"""What the tests of plans look at inside of autoamp: the only imports of it."""

from __future__ import annotations

from autoamp.passes.decide import devices
from autoamp.tools import (
    plan,
)
from autoamp.tools import (
    plan_mesh as mesh,
)
from autoamp.tools import (
    plan_named as named,
)
from autoamp.tools import (
    plan_ranks as ranks,
)
from autoamp.tools import (
    plan_step as step,
)
from autoamp.tools import (
    plan_ways as ways,
)

FP32, AUTOCAST, AUTOAMP = ways.FP32, ways.AUTOCAST, ways.AUTOAMP
IN_FP32, Setting, WayStep = ways.IN_FP32, ways.Setting, ways.WayStep
Link, Mesh, way_of = mesh.Link, mesh.Mesh, mesh.way_of
Sent, bytes_of = step.Sent, step.bytes_of
named_model = named.named_model
as_rank, parallelized = ranks.as_rank, ranks.parallelized

__all__ = ["devices", "mesh", "plan", "ranks", "ways"]
