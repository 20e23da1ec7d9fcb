"""Read the text of PDF and Word documents, for models that see no pictures of their pages."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from typing import Any, Final
from xml.etree import ElementTree

from cpuserve.base.errors import InvalidRequest
from cpuserve.media.decoding.formats import PdfDocument, is_document

DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
# More text than this fits no context.
MOST_CHARS = 1 << 24
_MOST_PAGES = 10_000
_SIDE = 1000  # of pages that are not drawn
_ZIP = b"PK\x03\x04"
_CONTENT = "word/document.xml"
_WORD: Final = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_LINES = ("br", "cr")
# Errors of the libraries for archives and XML that they cannot read.
_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, ElementTree.ParseError),
    *(NotImplementedError, RuntimeError, EOFError, ValueError, OSError),
)


def has_word_head(data: bytes) -> bool:
    """Return whether these bytes may be a Word document (.docx), which is an archive of XML."""
    return data.startswith(_ZIP)


def text_of_document(data: bytes) -> str:
    """Return the text of a document: its paragraphs in lines, and a tab between cells of tables.

    Raises InvalidRequest if it cannot be read or has no text; the message has no subject.
    """
    parts = _pages(data) if is_document(data) else _paragraphs(data)
    paragraphs, chars_left = [], MOST_CHARS
    for part in parts:
        chars_left -= len(part) + 1
        if chars_left < 0:
            msg = f"has more than {MOST_CHARS >> 20} million characters: send a part of it"
            raise InvalidRequest(msg)
        paragraphs.append(part)
    text = "\n".join(paragraphs).strip()
    if not text:
        msg = "has no text, as scans do: send it to a model that reads pictures"
        raise InvalidRequest(msg)
    return text


def _pages(data: bytes) -> Iterator[str]:
    document = PdfDocument(data, _MOST_PAGES, _SIDE)
    for text in document.texts():
        yield f"{text.strip()}\n"


def _paragraphs(data: bytes) -> Iterator[str]:
    """Yield each paragraph, and each row of a table, of a Word document."""
    unknown_kind = "is neither a PDF nor a Word document: send its text, or save it as .docx"
    if not has_word_head(data):
        raise InvalidRequest(unknown_kind)
    try:
        with closing(zipfile.ZipFile(BytesIO(data))) as archive, archive.open(_CONTENT) as file:
            yield from _lines(ElementTree.iterparse(file, ("start", "end")))
    except KeyError:
        raise InvalidRequest(unknown_kind) from None
    except _DAMAGES as error:
        said = " ".join(str(error).split())[:200]
        msg = f"is a damaged Word document ({said}): save it again"
        raise InvalidRequest(msg) from None


def _lines(events: Iterator[tuple[str, Any]]) -> Iterator[str]:
    text: list[str] = []
    cells: list[str] = []
    rows = 0  # how many rows the element is in; tables may be in cells
    for event, element in events:
        name = element.tag.removeprefix(_WORD)
        if event == "start":
            rows += name == "tr"
            continue
        if name == "t":
            text.append(element.text or "")
        elif name == "tab":
            text.append("\t")
        elif name in _LINES:
            text.append("\n")
        elif name == "p" and not rows:
            yield "".join(text)
            text.clear()
        elif name == "p":
            text.append(" ")
        elif name == "tc" and rows == 1:
            cells.append("".join(text).strip())
            text.clear()
        elif name == "tr":
            rows -= 1
            if not rows:
                yield "\t".join(cells)
                cells.clear()
        if name in ("p", "tr"):
            element.clear()  # the whole tree would take much memory
