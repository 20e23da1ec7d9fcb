"""The pages with tables that come from the code, and the markers between which the tables are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from cpuserve.cli import listings
from docs.tables import fields, migrating, options, reports

DOCS = Path(__file__).parents[1]
# For each page, the tables in Markdown by the name in their markers.
PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "options.md": {"options": options.table},
    "migrating.md": {
        server.title: partial(migrating.tables, server) for server in migrating.SERVERS
    },
    "fields.md": {"fields": fields.tables},
    "metrics.md": {"metrics": reports.metrics},
    "doctor.md": {"report": reports.report},
    "models.md": {"models": listings.page},
    "guides/tuning.md": {"waits": reports.waits},
}


def replaced(name: str, text: str) -> str:
    """Return the text of the page `name` with new tables between its markers.

    Raises:
        ValueError: a marker is missing, or the markers are in the wrong order.
    """
    for part, made in PAGES[name].items():
        begin, end = f"<!-- {part}: made by python -m docs.tables -->", f"<!-- end of {part} -->"
        before, first, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not first or not last:
            msg = f"{name}: the markers {begin!r} and {end!r} are missing"
            raise ValueError(msg)
        text = f"{before}{begin}\n{made()}\n{end}{after}"
    return text
