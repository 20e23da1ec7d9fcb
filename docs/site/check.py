"""Checks a built site: nothing is loaded from other servers, and every link leads somewhere.

`python -m docs.site.check DIR` prints each problem, and exits with code 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that load a resource when the page is opened, and the attribute with its address.
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
# Relations of <link> that load nothing.
RELATIONS = {"canonical", "prev", "next", "alternate"}
IMPORT = re.compile(r"""(?:@import\s+|url\()['"]?(https?:)?//""")


class Page(HTMLParser):
    """The ids, links and loaded resources of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect an element."""
        of = {name: value or "" for name, value in attrs}
        self.ids |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        address = of.get(LOADED.get(tag, ""), "")
        if address and not RELATIONS & {*of.get("rel", "").split()}:
            self.loaded.append(address)


def problems(directory: Path) -> Iterator[str]:
    """Yield a line for each problem of the site in `directory`."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(directory.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(directory).as_posix()
        if path.name == "404.html":  # its addresses begin at the root of the host
            page.links, page.loaded = [], [a for a in page.loaded if "//" in a]
        for address in page.loaded:
            if urlsplit(address).netloc:
                yield f"{where} loads {address} from another server"
            elif not address.startswith("data:") and not _target(path, address).is_file():
                yield f"{where} loads {address}, which does not exist"
        for address in page.links:
            yield from _link(where, path, address, pages)
    for path in sorted(directory.rglob("*.css")):
        if IMPORT.search(path.read_text("utf-8")):
            yield f"{path.relative_to(directory).as_posix()} loads a resource from another server"


def _link(where: str, path: Path, address: str, pages: dict[Path, Page]) -> Iterator[str]:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return
    target = _target(path, address)
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        yield f"{where} has a link to {address}, which does not exist"
    elif parts.fragment and unquote(parts.fragment) not in (pages[target].ids if target in pages
                                                            else ()):  # fmt: skip
        yield f"{where} has a link to {address}, which has no such part"


def _target(path: Path, address: str) -> Path:
    name = unquote(urlsplit(address).path)
    return (path.parent / name).resolve() if name else path


def main(directory: Path) -> int:
    """Print the problems of the site in `directory`; return 1 if there is one."""
    found = [*problems(directory.resolve())]
    print("\n".join(found) or f"{directory}: every link leads somewhere, and all is local")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
