"""Hooks of MkDocs: add pages from outside docs/, and rewrite links to work on the site.

The pages of docs/ have links that work in a checkout. On the site, a link
to a page leads to that page, and a link to another file of the repository becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[2]
# Pages outside docs/, and their places on the site.
PROJECT = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples/README.md": "project/examples.md",
}
SOURCES = {place: source for source, place in PROJECT.items()}
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^)\s]+)\)")
# The script that draws the diagrams; .ci/run docs puts it there.
MERMAID = "assets/mermaid.min.js"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of PROJECT to the files of the site."""
    from mkdocs.structure.files import File

    for source, place in PROJECT.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with its links rewritten so that they work on the site."""
    return rewritten(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return the HTML; a page with diagrams loads the script that draws them."""
    if 'class="mermaid"' not in output:
        return output
    place = os.path.relpath(MERMAID, PurePosixPath(page.url).parent)
    return output.replace("</head>", f'<script src="{place}"></script></head>', 1)


def rewritten(markdown: str, place: str) -> str:
    """Return a page's Markdown with links that work on the site; place: its path there."""
    source = ROOT / (SOURCES.get(place) or f"docs/{place}")

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        to = _place((source.parent / path).resolve())
        if to is None:
            return words
        relative = os.path.relpath(to, PurePosixPath(place).parent)
        return f"[{words}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, markdown)


def _place(path: Path) -> str | None:
    """Return the place of a file on the site; None if it has none."""
    name = path.relative_to(ROOT).as_posix()
    if name in PROJECT:
        return PROJECT[name]
    inside = name.startswith("docs/") and not name.startswith("docs/site") and path.is_file()
    return name.removeprefix("docs/") if inside else None
