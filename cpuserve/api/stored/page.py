"""Pagination of lists in the OpenAI API: parameters `limit`, `order`, `after` and `before`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from cpuserve.base.errors import InvalidRequest

T = TypeVar("T")
_MOST, _DEFAULT = 100, 20


class Page(msgspec.Struct):
    """One page of a list. first_id, last_id: the ids of its first and last element."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page_of(
    query: Mapping[str, str],
    found: Sequence[T],
    id_of: Callable[[T], str],
    data_of: Callable[[T], bytes],
) -> Page:
    """Return the page of the list `found` (oldest first) that the query parameters select.

    Raises:
      InvalidRequest: a parameter is invalid, or `after` or `before` is not an id of the list.
    """
    direction = query.get("order", "desc")
    if direction not in ("asc", "desc"):
        msg = f"order must be asc or desc, got {direction[:80]!r}"
        raise InvalidRequest(msg, param="order")
    most = limit_of(query)
    ordered = list(found) if direction == "asc" else list(reversed(found))
    ids = [id_of(one) for one in ordered]
    start = 0 if "after" not in query else _place(ids, "after", query["after"]) + 1
    end = len(ids) if "before" not in query else _place(ids, "before", query["before"])
    rest = max(0, end - start)
    # With `before`, the page ends just before this element; otherwise it begins at `start`.
    if "before" in query and "after" not in query:
        start = max(start, end - most)
    shown = ordered[start : min(end, start + most)]
    return Page(
        [msgspec.Raw(data_of(one)) for one in shown],
        id_of(shown[0]) if shown else None,
        id_of(shown[-1]) if shown else None,
        rest > len(shown),
    )


def limit_of(query: Mapping[str, str], most: int = _MOST) -> int:
    """Return the maximum length of a page; InvalidRequest if `limit` is not from 1 to `most`."""
    given = query.get("limit", str(_DEFAULT))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        msg = f"limit must be from 1 to {most}, got {given[:80]!r}"
        raise InvalidRequest(msg, param="limit")
    return int(given)


def _place(ids: Sequence[str], name: str, given: str) -> int:
    if given not in ids:
        msg = f"{name} is {given[:80]!r}, which is no id of this list: send an id that it has"
        raise InvalidRequest(msg, param=name)
    return ids.index(given)
