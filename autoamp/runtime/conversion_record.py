"""The record of a conversion: graphs, calls, what is left out, and its log lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.messages import (
    NO_FLOAT_OP,
    all_high,
    log_left_to_autocast,
    log_once,
    printable_line,
)
from autoamp.passes.graph_record import Rewritten
from autoamp.runtime.captured_graph import Graph
from autoamp.training.model_scaling import ModelScaling
from autoamp_said import logger_of

logger = logger_of(__name__)

_LEFT = (
    "Dynamo leaves it to Python, after a graph break it cannot go on from (in a loop, "
    "a `with`, a `try`); what it calls is captured by itself, and operations written "
    "in it run in fp32. TORCH_LOGS=graph_breaks tells more"
)


_AT_THE_LIMIT = (
    "some calls of it run in fp32, except modules it calls, which are captured by "
    "themselves: each kind of call needs a graph of its own, and Dynamo makes no more "
    "of them than torch._dynamo.config.recompile_limit. They differ in"
)


_FAILED = (
    "Dynamo failed on it and leaves it to Python: what it calls is captured by itself, "
    "and operations written in it run in fp32; its error is"
)


_CHANGES = (
    "each of its calls changes what its graph was made for (a list that grows, a "
    "number that is new each time), so it is left to Python: what it calls is captured "
    "by itself, and operations written in it run in fp32. It changes"
)


_METHOD = (
    "the modules that it calls are captured one by one, and operations written in it "
    "run in fp32"
)


_TO_THE_SCRIPT = (
    "autocast of the script's own, or of its trainer's, is entered inside it: that "
    "autocast chooses the precision, and calls run as they are written"
)


@dataclass
class Skipped:
    """Something that was not converted, and why."""

    what: str
    why: str


@dataclass(eq=False)
class Record:
    """The record of one conversion, with all graphs of all its compilers.

    Attributes:
        label: the model's class name, for messages.
        low: the compute dtype.
        scaling: the conversion's loss scaling.
        graphs: every captured graph, in order of capture.
        unfinished: graphs that failed calls captured, and no finished call has run.
        skipped: the parts that were not converted.
        calls: calls of the models so far.
        aside: calls that ran no rewritten graph.
        in_part: calls that ran rewritten graphs and graphs the pass failed on.
        lowers: some op of some graph is low.
        announced: the log line about the conversion has been written.
        announced_low: that line has said that ops are low.
        told_of_capture: it has been said that a first call takes long.
        left_to_script: autocast of the script's own chooses the precision of all calls.
    """

    label: str
    low: torch.dtype
    scaling: ModelScaling
    graphs: list[Graph] = field(default_factory=list)
    unfinished: list[Graph] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    calls: int = 0
    aside: int = 0
    in_part: int = 0
    lowers: bool = False
    announced: bool = False
    announced_low: bool = False
    told_of_capture: bool = False
    left_to_script: bool = False

    @property
    def runs(self) -> int:
        """Executions of rewritten graphs so far, in all threads."""
        return sum(g.runs for g in self.graphs if g.rewritten is not None)

    @property
    def stays_fp32(self) -> bool:
        """Whether the pass left every graph so far as it was.

        Graphs of a model that arrived in fp16 have no low op, but scale gradients.
        """
        if self.lowers or not self.graphs:
            return False
        return all(
            each.rewritten is not None and not each.edge.devices for each in self.graphs
        )

    def add(self, captured: Graph) -> None:
        """Keeps a graph new to this model, and why it has no low op if it has none."""
        self.graphs.append(captured)
        rewritten = captured.rewritten
        sums = (0, 0) if rewritten is None else (rewritten.sums.low, rewritten.sums.ops)
        self.scaling.ledger.note_graph(*sums, short_name(self.low))
        why = captured.problem
        if rewritten is not None:
            low, every, _ = rewritten.sums
            if low:
                self.lowers = True
            elif every:
                why = all_high(every)
            else:
                why = NO_FLOAT_OP
            if logger.isEnabledFor(logging.DEBUG):
                self._log(rewritten)
        if why:
            self.skipped.append(Skipped(f"graph {len(self.graphs) - 1}", why))

    def forget(self, had: int, ran: int) -> None:
        """Sets graphs after the first `had` aside, as the call that made them failed.

        A graph that a finished call has run, in another thread, stays.

        Args:
            ran: how many graphs the failed call ran, which no report counts.
        """
        new = self.graphs[had:]
        for each in new if ran else ():
            each.runs = 0
            each.sizes.clear()
        self.graphs[had:] = [each for each in new if each.runs]
        self.unfinished += [each for each in new if not each.runs]

    def keep_run(self) -> None:
        """Keeps the graphs of failed calls that a finished call has run since."""
        for each in [each for each in self.unfinished if each.runs]:
            self.unfinished.remove(each)
            self.graphs.append(each)

    def leave_out(self, problem: str) -> None:
        """Keeps the reason why the next graph cannot even be run as it is."""
        self.skipped.append(Skipped(f"graph {len(self.graphs)}", problem))

    def _log(self, rewritten: Rewritten) -> None:
        decisions = rewritten.assignment.decisions
        kinds = [c.kind for c in rewritten.casts]
        logger.debug(
            "autoamp: %s graph %d: %d of %d float ops in %s; casts: %d down, %d up, "
            "%d weight copies",
            self.label,
            len(self.graphs) - 1,
            sum(d.low for d in decisions.values()),
            len(decisions),
            short_name(self.low),
            kinds.count("down"),
            kinds.count("up"),
            kinds.count("weight"),
        )

    def note(self, why: str, *, aloud: bool = True) -> None:
        """Keeps for the report why something is not converted.

        Args:
            aloud: whether that is logged, too.
        """
        if any(s.why == why for s in self.skipped):
            return
        self.skipped.append(Skipped(self.label, why))
        if aloud:
            text = f"autoamp: {self.label}: {why}"
            log_once(logger, logging.WARNING, text, of=self.scaling)

    def leave_to_script(self) -> None:
        """Notes that the script's own autocast chooses the precision of all calls."""
        self.left_to_script = True
        self.note(_TO_THE_SCRIPT, aloud=False)

    def left_in_method(self, method: str) -> None:
        """Keeps for the report that a method calls modules outside of all graphs."""
        skipped = Skipped(method, _METHOD)
        if skipped not in self.skipped:
            self.skipped.append(skipped)

    @property
    def functions_left(self) -> list[str]:
        """The functions that Dynamo leaves to Python, by file, line and name."""
        return [s.what for s in self.skipped if s.why.startswith((_LEFT, _CHANGES))]

    def left_to_python(self, left: compat.Left) -> None:
        """Keeps for the report that Dynamo leaves a function to Python."""
        code = left.code
        place = printable_line(
            f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}"
        )
        if left.at_limit:
            # One function at the limit mostly brings others there: one warning will do.
            again = any(_AT_THE_LIMIT in s.why for s in self.skipped)
            why = f"{place}: {_AT_THE_LIMIT} {left.changes}"
            self.note(why, aloud=not again)
            return
        if left.error:
            self.note(f"{place}: {_FAILED} {left.error}")
            return
        why = f"{_CHANGES} {printable_line(left.changes)}" if left.changes else _LEFT
        skipped = Skipped(place, why)
        if skipped not in self.skipped:
            self.skipped.append(skipped)


def announce(record: Record) -> None:
    """Logs one line, after the first call that captured anything.

    A second line follows where nothing ran low in the first call, and later does.
    """
    if record.left_to_script:
        log_left_to_autocast(logger, record.label, of=record.scaling)
        return
    news = record.lowers and not record.announced_low
    if (record.announced and not news) or not logger.isEnabledFor(logging.INFO):
        return
    sums = [g.rewritten.sums for g in record.graphs if g.rewritten is not None]
    # The pass failed, and a warning has said so, or the graphs have no float op.
    if not any(each.ops for each in sums):
        return
    record.announced, record.announced_low = True, record.lowers
    if not any(each.low for each in sums):
        if any(graph.in_own_autocast for graph in record.graphs):
            log_left_to_autocast(logger, record.label, of=record.scaling)
            return
        every = sum(each.ops for each in sums)
        which = f"none of its {every} float ops" if every > 1 else "its float op"
        where = "report.why(name) says"
        if record.scaling.by_variables:
            where = "the files that AUTOAMP_REPORT_DIR=FOLDER asks for say"
        log_once(
            logger,
            logging.INFO,
            f"autoamp: {record.label} stays in fp32: {which} would gain in "
            f"{short_name(record.low)} what its casts cost; {where} the reason for "
            "each",
            of=record.scaling,
        )
        return
    scale = record.scaling.loss_scale.scale if record.scaling.enabled else "off"
    # The first function left may have no op of its own: a wrapper whose modules are
    # captured by themselves.
    functions, in_python = record.functions_left, ""
    if functions:
        more = f" and {len(functions) - 1} more" if len(functions) > 1 else ""
        in_python = (
            f"; left to Python, operations written there in fp32: {functions[0]}{more}"
        )
    log_once(
        logger,
        logging.INFO,
        f"autoamp: {record.label} is converted to {short_name(record.low)}: "
        f"{sum(each.low for each in sums)} of {sum(each.ops for each in sums)} "
        f"float ops low, {sum(each.casts for each in sums)} casts, loss scale "
        + (f"{scale:g}" if isinstance(scale, float) else scale)
        + in_python,
    )


def tell_progress(record: Record, seconds: float) -> None:
    """Logs a line while a first call is being captured, once for the model.

    Later lines (of a call that takes long, or of a first call in another mode) are
    for those who debug.
    """
    again, record.told_of_capture = record.told_of_capture, True
    logger.log(
        logging.DEBUG if again else logging.INFO,
        "autoamp: the first call of %s has taken %.0f s: it is being captured, "
        "and has %d graphs so far",
        record.label,
        seconds,
        len(record.graphs),
    )
