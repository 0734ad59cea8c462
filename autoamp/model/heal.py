"""Captures a model again under one more rule, while it is trained."""

from __future__ import annotations

from autoamp.capture.engine import Engine
from autoamp.capture.record import Record
from autoamp.model.calls import CompiledCall
from autoamp.model.conversion import CONVERSIONS
from autoamp.ranges.rules import Rule
from autoamp.scaling.domain import ModelScaling


def heal(scaling: ModelScaling, rule: Rule) -> None:
    """Has the models of `scaling` captured again, at their next calls, under `rule`.

    The loss scale, the optimizers and the reasons for skipped steps are kept.  Graphs
    that a backward has yet to run through live as long as that backward needs them.
    """
    renewed: dict[Engine, Engine] = {}
    for state in list(CONVERSIONS):
        call, engine = state.call, state.engine
        if call is None or engine is None or engine.record.scaling is not scaling:
            continue
        if engine not in renewed:
            renewed[engine] = _under(rule, engine)
        state.call = CompiledCall(call.method, renewed[engine])


def _under(rule: Rule, engine: Engine) -> Engine:
    old = engine.record
    record = Record(old.label, old.low, old.scaling)
    # Notes about graphs are made again with the graphs.
    record.skipped += [each for each in old.skipped if each.what == old.label]
    return Engine(rule.on(engine.options), record)
