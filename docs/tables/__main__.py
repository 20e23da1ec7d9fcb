"""Writes the tables of all pages that come from the code: `python -m docs.tables`."""

from __future__ import annotations

from docs.tables.pages import DOCS, PAGES, replaced

for name in PAGES:
    page = DOCS / name
    page.write_text(replaced(name, page.read_text(encoding="utf-8")), encoding="utf-8")
