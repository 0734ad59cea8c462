"""Reads the page of a report: its ops and casts, for `autoamp diff`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from autoamp.errors import OptionError
from autoamp.messages import printable_line
from autoamp.passes.report_rows import SCHEMA, VERSION, SavedReport
from autoamp.passes.saved_reports import report_in
from autoamp.reports.page.data import PAGE_SCHEMA, PAGE_VERSION

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)

_GIVE = "write it with `autoamp explain MODEL --html FILE` or report.to_html(FILE)"

_Data = dict[str, Any]


def page_at(path: str) -> _Data:
    """The data of the page in a file.

    Raises:
        OptionError: the file cannot be read, or is no page of this version.
    """
    shown = printable_line(path, 300)
    try:
        match = _DATA.search(Path(path).read_text(encoding="utf-8"))
        data = json.loads(match[1]) if match else None
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{shown}: cannot be read as a page ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != PAGE_SCHEMA:
        raise OptionError(f"{shown}: it is not the page of a report; {_GIVE}")
    if data.get("version") != PAGE_VERSION:
        raise OptionError(
            f"{shown}: another version of autoamp wrote this page; write it again: "
            "autoamp explain MODEL --html FILE"
        )
    return data


def report_of_page(path: str, data: _Data) -> SavedReport:
    """The ops and casts of a page, as a report that can be compared.

    Raises:
        OptionError: the data is not that of a page.
    """
    try:
        rows = _rows(data)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise OptionError(
            f"{path}: the data of the page is damaged ({error!r})"
        ) from None
    return report_in(printable_line(path, 300), rows)


def _rows(data: _Data) -> _Data:
    report: _Data = {"schema": SCHEMA, "version": VERSION, "ops": [], "casts": []}
    report |= {"model": data["model"], "compute_dtype": data["compute_dtype"]}
    report["graphs"] = []
    for graph in data["graphs"]:
        number, _, body = graph["key"].partition("/")
        where = {"graph": int(number), "body": body}
        report["graphs"].append({**where, "device": graph["tables"]["device"]})
        for node in graph["nodes"]:
            if node["cast"]:
                report["casts"].append({**where, "name": node["name"], **node["cast"]})
            if node["decision"]:
                decision = node["decision"]
                reason = {"reason": f"{decision['rule']}; {decision['reason']}"}
                report["ops"].append({**node, **where, **decision, **reason})
    return report
