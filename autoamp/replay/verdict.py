"""What a replay found: the step to blame in words, and the rule that cures it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from autoamp.dtypes import LOW_DTYPES, largest, short_name
from autoamp.overflow.culprit import first_out_of_range, root_of
from autoamp.overflow.location import INPUT, OUTSIDE, WEIGHT
from autoamp.overflow.message import accused
from autoamp.overflow.remedy import Remedy
from autoamp.overflow.trail import Step
from autoamp.replay.recorded import Recorded
from autoamp.replay.session import Outcome
from autoamp.replay.weights import blamed_weight, large_weight

CURED, NOT_CURED, NOT_REPRODUCED = 0, 1, 3


@dataclass
class Verdict:
    """The answer of `autoamp replay`.

    Attributes:
        reproduced: whether the step died again.
        kind: "op", "input", "weight", "loss", "optimizer", or "" if unknown.
        headline: one sentence on the cause.
        op, module, source, dtype, magnitude: of the step to blame.
        more: further sentences.
        in_fp32: whether fp32 dies as well; None where it was not tried.
        rule: the rule that was tried and cures it.
        notes: what differs from the recorded training.
    """

    label: str
    rank: int
    step: int
    died_of: str
    reproduced: bool
    kind: str = ""
    headline: str = ""
    op: str = ""
    name: str = ""
    module: str = ""
    source: str = ""
    dtype: str = ""
    magnitude: float | None = None
    backward: bool = False
    more: list[str] = field(default_factory=list)
    in_fp32: bool | None = None
    rule: Remedy | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status of the command."""
        if not self.reproduced:
            return NOT_REPRODUCED
        return CURED if self.rule is not None else NOT_CURED

    def lines(self) -> list[str]:
        """The answer for people."""
        where = f"{self.label}, rank {self.rank}, step {self.step}"
        found = [f"autoamp replay: {where}: {self.died_of}"]
        what = "reproduced" if self.reproduced else "not reproduced"
        found.append(f"  {what}: {self.headline}")
        if self.source:
            found.append(f"  at      {self.source}")
        found += [f"  {each}" for each in self.more]
        if self.rule is not None:
            found.append(
                f"  cure    autoamp.convert(model, {self.rule}) - tried: it works"
            )
        elif self.in_fp32:
            found.append("  fp32 dies there too: no rule of autoamp can cure it")
        elif self.reproduced:
            found.append("  no rule was found that cures it")
        return found + [f"  note    {each}" for each in self.notes]

    def as_dict(self) -> dict[str, Any]:
        """The answer for programs."""
        rule = self.rule
        told = {k: v for k, v in vars(self).items() if k != "rule"}
        if self.magnitude is not None and not math.isfinite(self.magnitude):
            told["magnitude"] = str(self.magnitude)
        told["rule"] = None
        if rule is not None:
            told["rule"] = {"deny": [*rule.deny], "keep": [*rule.keep]}
        return {"format": 1, **told, "status": self.status}

    def toml(self) -> str:
        """The rule as a rules file."""
        assert self.rule is not None
        what = f"{self.label} died at step {self.step}: tried by autoamp replay"
        found = ["[meta]", f"description = {json.dumps(what)}"]
        if self.rule.deny:
            found += ["", "[deny]"]
            found += [f'{json.dumps(n)} = "left its range"' for n in self.rule.deny]
        if self.rule.keep:
            found += ["", "[keep]", f"modules = {json.dumps([*self.rule.keep])}"]
        return "\n".join(found) + "\n"


def blamed(outcome: Outcome) -> Step | None:
    """The step that made the loss or a gradient infinite or NaN, or None."""
    if outcome.loss is not None and not math.isfinite(outcome.loss):
        end = outcome.loss_step
        if end is not None and not end.is_finite:
            root = root_of(end)
            if not root.literal:
                return root
    return first_out_of_range(outcome.trail, outcome.loss_step)


def judged(recorded: Recorded, outcome: Outcome) -> Verdict:
    """The verdict on one run of the step, before any rule is tried."""
    found = Verdict(
        recorded.label,
        recorded.rank,
        recorded.step,
        recorded.died_of,
        outcome.died,
        notes=list(dict.fromkeys(outcome.notes)),
    )
    if not outcome.died:
        found.headline = _difference(recorded, outcome)
        return found
    step = blamed(outcome)
    if step is None:
        return _without_trail(found, recorded, outcome)
    where = step.location
    found.op, found.name, found.module = where.op, where.name, where.module
    found.source, found.dtype = where.source, short_name(step.dtype)
    found.magnitude = step.largest if step.wide is None else step.wide
    found.backward = step.is_backward
    low = step.dtype in LOW_DTYPES.values()
    found.headline = accused(step, outcome.scale if low else None)
    found.kind = {INPUT: "input", WEIGHT: "weight", OUTSIDE: "loss"}.get(
        where.kind, "op"
    )
    if where.kind == OUTSIDE:
        found.headline = f"outside of the model, in the loss: {found.headline}"
    elif where.kind == INPUT and not step.is_cast and not step.is_backward:
        kind = "NaN" if math.isnan(step.largest) else "inf"
        found.headline = f"the batch holds {kind} in {where.name}"
    elif where.name in recorded.facts.get("not_finite", ()) or (
        f"model.{where.name}" in recorded.facts.get("not_finite", ())
    ):
        return _of_weight(found, where.name, recorded, outcome)
    _add_size(found, step)
    if grown := large_weight(recorded):
        found.more.append(grown)
    return found


def _of_weight(
    found: Verdict, name: str, recorded: Recorded, outcome: Outcome
) -> Verdict:
    found.kind, found.name, found.in_fp32 = "weight", name, True
    found.headline, line = blamed_weight(name, recorded, outcome.step_line)
    if line:
        found.kind, found.source = "optimizer", line
    return found


def _add_size(found: Verdict, step: Step) -> None:
    if step.wide is not None and math.isfinite(step.wide):
        limit = largest(step.dtype)
        found.more.append(
            f"magnitude {step.wide:.4g} in fp32, {step.wide / limit:.3g} times the "
            f"limit {limit:g} of {short_name(step.dtype)}"
        )


def _without_trail(found: Verdict, recorded: Recorded, outcome: Outcome) -> Verdict:
    spoiled = [n.partition(".")[2] for n in recorded.facts.get("not_finite", ())]
    if spoiled:
        return _of_weight(found, spoiled[0], recorded, outcome)
    found.headline = f"the loss is {outcome.loss}"
    if outcome.bad:
        more = f" and {len(outcome.bad) - 1} more" if len(outcome.bad) > 1 else ""
        found.headline = f"the gradient of {outcome.bad[0]}{more} is not finite"
    found.more.append("no op of the captured graphs, or of the loss, has made it")
    return found


def _difference(recorded: Recorded, outcome: Outcome) -> str:
    """Which numbers differ from the recorded ones."""
    parts = []
    if recorded.cause == "loss":
        now = "unknown" if outcome.loss is None else f"{outcome.loss:.6g}"
        parts.append(f"{recorded.died_of}, and is {now} now")
    else:
        parts.append(f"{recorded.died_of}, and this step is not skipped")
    mine = [r for r in recorded.steps if r.get("step") == recorded.step]
    if mine and mine[-1].get("gradient") is not None:
        parts.append(
            f"the largest gradient was {mine[-1]['gradient']}, and is "
            f"{outcome.largest:.6g} now"
        )
    return "; ".join(parts)
