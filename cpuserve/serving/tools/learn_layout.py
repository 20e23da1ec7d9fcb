"""Find the layout of calls in the text that a template writes for known calls.

A way of writing arguments has a reader: a function that finds the known arguments
in the text of a call. READERS has all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cpuserve.serving.tools.brace_calls import Braces
from cpuserve.serving.tools.element_values import written as elements_of
from cpuserve.serving.tools.layout import ID, NAME, CallLayout, LayoutFormat, Writing, atoms
from cpuserve.serving.tools.object_calls import NAMED_JSON, Objects
from cpuserve.serving.tools.python_calls import PYTHON
from cpuserve.serving.tools.tag_calls import Tags
from cpuserve.serving.tools.tag_texts import KEY
from cpuserve.serving.tools.values import types_of

# How many braces may come between a name and its arguments.
_MOST_BRACES = 3


@dataclass(frozen=True, slots=True)
class CallProbe:
    """Calls with known names and arguments, as a template writes them.

    one, two: the text of a response with one call, and with two calls
      ("" = the template cannot write two).
    ids: the ids of the two calls.
    """

    one: str
    two: str
    names: Sequence[str]
    ids: Sequence[str]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FoundArguments:
    """The arguments of a call, text[begin:end], and the `Writing` that reads them."""

    begin: int
    end: int
    writing: Writing


# A reader gets the text of a response, the position of the function's name in this text,
# and the probe. The reader returns None if the arguments are written in another way.
CallReader = Callable[[str, int, CallProbe], FoundArguments | None]


def layouts(probe: CallProbe) -> Iterator[LayoutFormat]:
    """Yield the formats that may have written the calls; the caller must try each of them."""
    for name, read in READERS:
        for at in _places(probe.one, probe.names[0]):
            found = read(probe.one, at, probe)
            if found is not None:
                layout = _layout(probe, at, found, read)
                if layout is not None:
                    layout, writing = _divided(layout, found.writing)
                    form = LayoutFormat(name, layout, writing)
                    if form.opens and (layout.end.strip() or not isinstance(writing, Tags)):
                        yield form


def _divided(layout: CallLayout, writing: Writing) -> tuple[CallLayout, Writing]:
    """Return the layout and writing, changed so that arguments and the end begin differently.

    If an argument and the end of a call begin with the same text, this text is moved to the end
    of the text before the first argument, and to the end of the text after each argument.
    """
    if not isinstance(writing, Tags):
        return layout, writing
    same = common_beginning(writing.open, layout.end)
    if not writing.open[len(same) :].strip() or not layout.end[len(same) :].strip():
        return layout, writing
    parted = replace(layout, middle=layout.middle + same, end=layout.end[len(same) :])
    return parted, replace(writing, open=writing.open[len(same) :], tail=writing.tail + same)


def _places(text: str, name: str) -> list[int]:
    return [found.start() for found in re.finditer(re.escape(name), text)][:3]


def _layout(
    probe: CallProbe, at: int, found: FoundArguments, read: CallReader
) -> CallLayout | None:
    """Return the texts around the calls, from the responses with one call and with two calls."""
    one, two = probe.one, probe.two
    name, other = probe.names[:2]
    before = _with_ids(one[:at], probe)
    middle = _with_ids(one[at + len(name) : found.begin], probe).replace(name, NAME)
    after = _with_ids(one[found.end :], probe)
    section, begin, end, between, close = "", before, after, "", ""
    second = two.find(other, found.end) if two.startswith(one[: found.end]) else -1
    if second >= 0:
        further = read(two, second, replace(probe, names=[other]))
        if further is not None:
            inner = _with_ids(two[found.end : second], probe)
            last = _with_ids(two[further.end :], probe)
            again = _with_ids(two[second + len(other) : further.begin], probe)
            middle = _numbered(middle, again.replace(other, NAME))
            begin = common_end(before, inner)
            inner_begin = inner[len(inner) - len(begin) :]
            section = before[: len(before) - len(begin)]
            begin = _numbered(begin, inner_begin)
            inner = inner[: len(inner) - len(inner_begin)]
            end = common_beginning(last, inner)
            between, close = inner[len(end) :], last[len(end) :]
    return _finished(CallLayout(section, begin, middle, end, between, close), probe)


def _finished(layout: CallLayout, probe: CallProbe) -> CallLayout | None:
    """Return the layout with `ids` set and no leading white space; None if nothing is left."""
    section, begin, middle, end = layout.section, layout.begin, layout.middle, layout.end
    close = layout.close
    if not section.strip():
        section, begin = "", (section + begin).lstrip()
    elif not layout.between:  # only the text after a call shows whether another call follows
        same = common_beginning(begin, close)
        if begin[len(same) :].strip():
            section, begin = section + same, begin[len(same) :]
            end, close = end + same, close[len(same) :]
    section = section.lstrip()
    ids = "given" if ID in begin + middle and any(i in probe.one for i in probe.ids) else ""
    if begin.endswith("functions.") and middle.startswith(f":{ID}"):
        ids = "indexed"
    layout = CallLayout(section, begin, middle, end, layout.between, close, ids)
    return layout if (section + begin).strip() else None


def _with_ids(text: str, probe: CallProbe) -> str:
    """Return `text` with ID in place of the ids of the probe's calls."""
    for one in probe.ids:  # if an id contains the function's name, the ids are "indexed"
        text = text.replace(one, ID)
    return re.sub(r"(?<=:)\d+(?=<)", ID, text)  # the 0 of functions.NAME:0


def _numbered(one: str, other: str) -> str:
    """Return `one` with ID in place of numbers, if it differs from `other` in numbers only."""
    if one == other:
        return one
    first, second = (re.sub(r"\d+", ID, text) for text in (one, other))
    return first if first == second else one


def _same(one: str, other: str) -> bool:
    return one == other or (one.isdigit() and other.isdigit())


def common_beginning(one: str, other: str) -> str:
    """Return the longest common beginning that ends between two tags or words."""
    length = 0
    for a, b in zip(atoms(one), atoms(other), strict=False):
        if not _same(a, b):
            break
        length += len(a)
    return one[:length]


def common_end(one: str, other: str) -> str:
    """Return the longest common end that begins between two tags or words."""
    length = 0
    for a, b in zip(atoms(one)[::-1], atoms(other)[::-1], strict=False):
        if not _same(a, b):
            break
        length += len(a)
    return one[len(one) - length :] if length else ""


def _in_object(text: str, at: int, probe: CallProbe) -> FoundArguments | None:
    """Find the JSON object that contains the name at index `at` and the arguments."""
    name, arguments = probe.names[0], dict(probe.arguments)
    decoder = json.JSONDecoder()
    for start in reversed([i for i in range(at) if text[i] == "{"]):
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            continue
        if end < at or not isinstance(value, dict):
            continue
        keys = [key for key, member in value.items() if member == name]
        keyed = value == {name: arguments}
        has_arguments = any(member == arguments for member in value.values())
        if not (keyed or (keys and has_arguments)):
            continue
        inner = _object_behind(text, at + len(name), arguments)
        if inner is None or inner[1] > end:  # the arguments come before the name
            return FoundArguments(at + len(name), end, Objects(keyed, forces=False))
        return FoundArguments(*inner, Objects(keyed))
    return None


def _object_behind(text: str, at: int, arguments: Any) -> tuple[int, int] | None:
    """Return (begin, end) of the JSON object `arguments` if it comes soon after index `at`."""
    for found in list(re.finditer(r"\{", text[at:]))[:_MOST_BRACES]:
        start = at + found.start()
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if value == arguments:
            return start, end
    return None


def _named_json(text: str, at: int, probe: CallProbe) -> FoundArguments | None:
    """Find arguments after the name, written as a JSON object."""
    found = _object_behind(text, at + len(probe.names[0]), dict(probe.arguments))
    return None if found is None else FoundArguments(*found, NAMED_JSON)


def _tagged(text: str, at: int, probe: CallProbe) -> FoundArguments | None:
    """Find arguments after the name, written as a key and a value with tags for each argument."""
    begin = at + len(probe.names[0])
    heads: dict[str, str] = {}
    gaps: list[str] = []
    tails: dict[str, str] = {}
    place, kind, is_python = begin, "", False
    rest = dict(probe.arguments)
    while rest:
        ahead = {key: found.start() for key in rest if (found := _key(key).search(text, place))}
        if not ahead:
            return None
        key = min(ahead, key=lambda one: ahead[one])
        value = _value_behind(text, ahead[key] + len(key), rest[key])
        if value is None:
            return None
        gaps.append(text[place : ahead[key]])
        if kind:
            tails[kind] = text[place : ahead[key]]
        kind = next(iter(types_of({"const": rest.pop(key)}, {})))
        heads[kind] = text[ahead[key] + len(key) : value[0]]
        is_python |= kind != "string" and not _is_json(text[value[0] : value[1]])
        place = value[1]
    open_ = gaps[0]
    for gap in gaps[1:]:
        open_ = common_end(open_, gap)
    if not open_.strip() or not all(head.strip() for head in heads.values()):
        return None
    tails = {k: gap[: len(gap) - len(open_)] for k, gap in tails.items()}
    plain = next((tail for k, tail in tails.items() if k != "string"), None)
    if plain is None or not plain.strip():
        return None
    first = begin + len(gaps[0]) - len(open_)
    writing = _tags(open_, heads, plain, tails.get("string", plain))
    writing = replace(writing, python=is_python)
    return FoundArguments(first, place + len(plain), writing)


def _tags(open_: str, heads: dict[str, str], tail: str, text_tail: str) -> Tags:
    """Return the `Tags` with these texts: heads before values, by type, and tails after values."""
    plain = next(head for kind, head in heads.items() if kind != "string")
    text, quote = heads.get("string", plain), ("", "")
    if text != plain and text.startswith(plain) and text_tail.endswith(tail):
        quote = (text[len(plain) :], text_tail[: len(text_tail) - len(tail)])
        heads = {**heads, "string": plain}
    if len(set(heads.values())) == 1:
        heads = {"": plain}
    return Tags(open_, tuple(heads.items()), tail, quote)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _key(key: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9_]){re.escape(key)}(?![A-Za-z0-9_])")


def _value_behind(text: str, at: int, value: Any) -> tuple[int, int] | None:
    """Return (begin, end) of the value after `at`, written plainly, as JSON or Python, or None."""
    if isinstance(value, str):
        ways = [value, json.dumps(value)[1:-1], repr(value)[1:-1]]
    else:
        ways = [json.dumps(value), str(value), json.dumps(value, separators=(",", ":"))]
    found = [(place, place + len(way)) for way in ways if (place := text.find(way, at)) >= 0]
    return min(found) if found else None


def _python(text: str, at: int, probe: CallProbe) -> FoundArguments | None:
    """Find arguments written as key=value in parentheses after the name."""
    begin = at + len(probe.names[0])
    if not text.startswith("(", begin):
        return None
    place = begin + 1
    for key, value in probe.arguments.items():
        start = text.find(f"{key}=", place)
        found = _value_behind(text, start + len(key), value) if start >= 0 else None
        if found is None:
            return None
        place = found[1]
    end = text.find(")", place)
    return None if end < 0 else FoundArguments(begin + 1, end + 1, PYTHON)


def _braces(text: str, at: int, probe: CallProbe) -> FoundArguments | None:
    """Find arguments in braces after the name, with strings between marks."""
    begin = at + len(probe.names[0])
    if not text.startswith("{", begin):
        return None
    words = next((v for v in probe.arguments.values() if isinstance(v, str)), "")
    key = next((k for k, v in probe.arguments.items() if v == words), "")
    start, of_text = text.find(f"{key}:", begin), text.find(words, begin)
    if start < 0 or of_text < start:
        return None
    mark = text[start + len(key) + 1 : of_text]
    depth, place = 0, begin
    for part in re.finditer(rf"{re.escape(mark)}.*?{re.escape(mark)}|[{{}}]", text[begin:], re.S):
        depth += (part[0] == "{") - (part[0] == "}")
        place = begin + part.end()
        if not depth:
            break
    order = [text.find(f"{key}:", begin) for key in sorted(probe.arguments)]
    writing = Braces(mark, sorts=order == sorted(order))
    return FoundArguments(begin + 1, place, writing) if mark.strip() else None


def _elements(text: str, at: int, probe: CallProbe) -> FoundArguments | None:
    """Find arguments that are each a tag named after the key, with tags inside of values.

    <invoke name="get_weather"><city>Paris</city><days><item>1</item></days></invoke>
    """
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
        whole = elements_of(dict(probe.arguments), tags)
        if (place := text.find(whole, begin)) >= 0:
            return FoundArguments(place, place + len(whole), tags)
    return None


# The ways of writing arguments, each with its name and its reader.
READERS: tuple[tuple[str, CallReader], ...] = (
    ("json_objects", _in_object),
    ("named_json", _named_json),
    ("tags", _tagged),
    ("pythonic", _python),
    ("braces", _braces),
    ("elements", _elements),
)
