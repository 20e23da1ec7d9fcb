"""Pagination of lists in the Anthropic API: parameters `limit`, `after_id` and `before_id`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEFAULT, _MOST = 20, 1000


def page_of_ids(ids: Sequence[str], query: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return the ids of one page, and whether the list has more ids in the same direction.

    Raises:
      InvalidRequest: `limit` is invalid, or `after_id` or `before_id` is not in the list.
    """
    limit = limit_of(query)
    if (before := query.get("before_id")) is not None:
        earlier = ids[: _place(ids, before, "before_id")]
        return list(earlier[-limit:]), len(earlier) > limit
    later = ids
    if (after := query.get("after_id")) is not None:
        later = ids[_place(ids, after, "after_id") + 1 :]
    return list(later[:limit]), len(later) > limit


def limit_of(query: Mapping[str, str]) -> int:
    """Return the maximum length of a page; InvalidRequest if `limit` is invalid."""
    limit_text = query.get("limit", str(_DEFAULT))
    limit = int(limit_text) if limit_text.isdecimal() and len(limit_text) < 5 else 0
    if not 1 <= limit <= _MOST:
        msg = f"limit must be a whole number from 1 to {_MOST}, got {limit_text[:40]!r}"
        raise InvalidRequest(msg, param="limit")
    return limit


def _place(ids: Sequence[str], given: str, field: str) -> int:
    if given not in ids:
        msg = f"{field} is {given[:200]!r}, which is not in the list: send an id of an earlier page"
        raise InvalidRequest(msg, param=field)
    return ids.index(given)
