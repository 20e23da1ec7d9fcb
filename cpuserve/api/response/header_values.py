"""Values of response headers."""

from __future__ import annotations

import json


def header_json(value: object) -> str:
    """Return a value as JSON that a header may have: ASCII without control characters."""
    # DEL is the only ASCII control character that JSON does not escape.
    return json.dumps(value).replace("\x7f", "\\u007f")
