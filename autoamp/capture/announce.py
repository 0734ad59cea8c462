"""Log lines about a conversion: that it is made, that it is slow, its outcome."""

from __future__ import annotations

import logging

from autoamp.capture.record import Record
from autoamp.dtypes import short_name
from autoamp.messages import log_left_to_autocast, log_once

logger = logging.getLogger(__name__)


def announce(record: Record) -> None:
    """Logs one line, after the first call that captured anything.

    A second line follows where nothing ran low in the first call, and later does.
    """
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
    log_once(
        logger,
        logging.INFO,
        f"autoamp: {record.label} is converted to {short_name(record.low)}: "
        f"{sum(each.low for each in sums)} of {sum(each.ops for each in sums)} "
        f"float ops low, {sum(each.casts for each in sums)} casts, loss scale "
        + (f"{scale:g}" if isinstance(scale, float) else scale)
        + _left_out(record),
    )


def _left_out(record: Record) -> str:
    """Names the first function that Dynamo leaves to Python, of which no op counts."""
    left = record.functions_left
    if not left:
        return ""
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return f"; not captured, and in fp32: {left[0]}{more}"


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
