"""Calls with a tag for each argument, its key as the name of the tag, and tags inside of values.

    <invoke name="get_weather"><city>Paris</city><days><item>1</item></days></invoke>

The parser and the grammar are in tag_calls.py, and the values in element_values.py.
"""

from __future__ import annotations

import re

from cpuserve.serving.tools.call_probe import CallProbe, FoundArguments
from cpuserve.serving.tools.element_values import written
from cpuserve.serving.tools.tag_calls import Tags
from cpuserve.serving.tools.tag_texts import KEY


def find_elements(text: str, at: int, probe: CallProbe) -> FoundArguments | None:
    """Find arguments that are each a tag named after the key, with tags inside of it."""
    begin = at + len(probe.names[0])
    key, words = next((k, v) for k, v in probe.arguments.items() if isinstance(v, str))
    start = text.find(words, begin)
    at_key, at_end = text.rfind(key, begin, start), text.find(key, start + len(words))
    if start < 0 or at_key < 0 or at_end < 0:
        return None
    head, before = text[at_key + len(key) : start], text[start + len(words) : at_end]
    if not (head and before.endswith("/") and text.endswith(before[:-1], begin, at_key)):
        return None
    for item in dict.fromkeys(re.findall(r"<(\w+)>", text[start:])):
        tail = f"{before}{KEY}{head}"
        tags = Tags(before[:-1], (("", head),), tail, item=item, prefix=before[:-1])
        whole = written(dict(probe.arguments), tags)
        if (place := text.find(whole, begin)) >= 0:
            return FoundArguments(place, place + len(whole), tags)
    return None
