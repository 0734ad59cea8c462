"""Finds the rule that gives ops the precision they had in an older report."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoamp.op_names import parse_op_name
from autoamp.saved.document import FP32, SavedOp

PIN = "autoamp"
"""The origin of calls that stay fp32 whatever the lists say of their op."""

FOLLOWS = "type promotion"
"""The origin of calls that are fp32 because they read fp32."""

_NO_LIST = (PIN, FOLLOWS)


@dataclass(frozen=True)
class Call:
    """One op of the newer report, and its precision in the older one.

    Attributes:
        op: the op as the newer report has it.
        was: its precision in the older report; "" where that has no such op.
        category, origin: those of the newer report.
        old_origin: the origin in the older report.
        by_rule: whether category or origin changed.
        follows: whether it moved because an op that it reads moved.
    """

    op: SavedOp
    was: str
    category: str = ""
    origin: str = ""
    old_origin: str = ""
    by_rule: bool = False
    follows: bool = False

    @property
    def now(self) -> str:
        """The precision in the newer report."""
        return self.op.precision

    @property
    def moved(self) -> bool:
        """Whether both reports have the op, in two precisions."""
        return bool(self.was) and self.was != self.now

    @property
    def lost_its_rule(self) -> bool:
        """Whether only an op that it reads holds the call in fp32 now."""
        still = self.was == self.now == FP32
        return still and self.origin == FOLLOWS != self.old_origin

    @property
    def rises_by_list(self) -> bool:
        """Whether a list is why the call is fp32, so that `allow=` would lower it."""
        return self.category == "deny" and self.origin not in _NO_LIST


@dataclass
class WayBack:
    """The rule for the old placement.

    Attributes:
        allow, deny: the ops that the rule names.
        keep: the modules that it keeps in fp32.
        unruled: each op that no rule moves back exactly, to the reason.
    """

    allow: list[str] = field(default_factory=list)
    deny: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    unruled: list[tuple[SavedOp, str]] = field(default_factory=list)

    def toml(self) -> str:
        """The rule as a rules file; "" where no op needs one."""
        lines = ["[meta]", 'description = "the placement before an upgrade"']
        for name, ops in (("allow", self.allow), ("deny", self.deny)):
            if ops:
                lines += ["", f"[{name}]"]
                lines += [f'{json.dumps(op)} = "as before the upgrade"' for op in ops]
        if self.keep:
            lines += ["", "[keep]", f"modules = {json.dumps(self.keep)}"]
        return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def way_back(calls: Sequence[Call]) -> WayBack:
    """The rule that moves calls back, and moves no other call as far as reports tell.

    `deny=` and `allow=` move all calls of an op.  Where some calls of an op are to be
    fp32 and others low, the modules of the former are kept in fp32, but only modules
    in which everything was fp32 before.

    Args:
        calls: every op of the newer report.
    """
    found = WayBack()
    moved = [call for call in calls if call.moved]
    # A call that followed another there follows it back.
    leaders = [call for call in moved if not call.follows] or moved
    if any(call.was != FP32 for call in leaders):
        # What holds these calls in fp32 may become low again.
        leaders += [call for call in calls if call.lost_its_rule]
    for name in dict.fromkeys(_name(call) for call in leaders):
        same = [call for call in calls if _name(call) == name]
        _add(found, name, same, [c for c in leaders if _name(c) == name], calls)
    kept = sorted(dict.fromkeys(found.keep))
    found.keep = [m for m in kept if not any(m.startswith(f"{k}.") for k in kept)]
    return found


def _name(call: Call) -> str:
    """The op's name as lists write it; a function that is no op keeps its own."""
    op = call.op.op
    if "::" not in op:
        return op
    return parse_op_name(op).partition(".")[0].removeprefix("aten::")


def _add(
    found: WayBack,
    name: str,
    same: Sequence[Call],
    moved: Sequence[Call],
    calls: Sequence[Call],
) -> None:
    """Adds to the rule what moves the calls of one op back.

    Args:
        same: all calls of the op.
        moved: those that are to move back.
        calls: the calls of all ops.
    """
    down = [call for call in moved if call.was == FP32]
    up = []
    for call in (call for call in moved if call.was != FP32):
        why = _no_list_lowers(call)
        if why:
            found.unruled.append((call.op, why))
        else:
            up.append(call)
    some_low = any(call.was not in ("", FP32) for call in same)
    if down and not some_low and "::" in down[0].op.op:
        found.deny.append(name)
        return
    # `allow=` would lower every call that a list holds in fp32.
    held = [c for c in same if up and c.was == c.now == FP32 and c.rises_by_list]
    modules = dict.fromkeys(call.op.module for call in (*down, *held))
    inexact = next(filter(None, (_also_kept(m, calls) for m in modules)), "")
    if inexact:
        found.unruled += [(call.op, inexact) for call in (*down, *up)]
        return
    # A bracket or a star in a path is a pattern unless it is escaped.
    found.keep += [glob.escape(module) for module in modules]
    if up:
        found.allow.append(name)


def _no_list_lowers(call: Call) -> str:
    """Why `allow=` does not lower a call; "" if it does."""
    if call.origin == PIN:
        return "autoamp or keep= holds this call in fp32, whatever the lists say"
    if not call.by_rule or call.origin == FOLLOWS:
        return "its price, or an op around it, makes it fp32, and no list does"
    if "::" not in call.op.op:
        return "lists name ops, and this is a function"
    return ""


def _also_kept(module: str, calls: Iterable[Call]) -> str:
    """What `keep=` of a module would keep besides, as a clause; "" if nothing."""
    if not module:
        return (
            "only some calls of the op are to move, and they are in no module, so that "
            "keep= cannot name them"
        )
    inside = (c for c in calls if f"{c.op.module}.".startswith(f"{module}."))
    others = [c for c in inside if (c.was or c.now) != FP32]
    if not others:
        return ""
    names = ", ".join(dict.fromkeys(_name(call) for call in others[:3]))
    return (
        f"only some calls of the op are to move, and keep={module!r} would also keep "
        f"{len(others)} that were low ({names})"
    )
