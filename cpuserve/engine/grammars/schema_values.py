"""Converts constraints of JSON schemas on numbers and texts to constraints of llguidance.

It has no bounds beyond 64 bits and rounds others to doubles; it accepts patterns that end in a
backslash, February 29 in every year, the year 0 and any number of digits in times and durations,
and refuses IPv6 addresses that end like IPv4 addresses. It has no look-around and no references
to groups: patterns with these are refused here, with their place.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# llguidance computes bounds as doubles, and ranges of whole numbers in 64 bits.
# LARGEST is the largest double below 2^63.
LARGEST = 2**63 - 1024
# json_masks.py limits integers to 20 digits, and numbers to doubles: larger bounds have no effect.
NO_INTEGER, NO_NUMBER = 10**20, 1e308
EXACT = 2**53

_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP = "(0[48]|[2468][048]|[13579][26])"
# A pattern for dates: years from 0100 on, and February 29 only in leap years.
_DATE = f"(([1-9][0-9]|0[1-9])[0-9]{{2}}-{_DAY}|(([1-9][0-9]|0[1-9]){_LEAP}|{_LEAP}00)-02-29)"
# A pattern for times: at most 9 digits follow the point, or models write digits until max_tokens.
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_N = "[0-9]{1,9}"
_OF_DAY = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_DURATION = f"P(({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)({_OF_DAY})?|{_OF_DAY}|{_N}W)"

# The own pattern of llguidance for this format has x([x-]*x)? for a label of a domain.
# With it, bitmasks take milliseconds, because llguidance does not see that any x may follow.
# _LABEL matches the same labels.
_LABEL = "[a-zA-Z0-9]+(-+[a-zA-Z0-9]+)*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_BYTE = "([0-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5])"
_EMAIL = rf"{_ATOM}(\.{_ATOM})*@({_LABEL}(\.{_LABEL})*|\[({_BYTE}\.){{3}}{_BYTE}\])"

# All forms of RFC 4291: eight groups, where :: stands for one or more groups of zeros. The last two
# may be an IPv4 address, as in ::ffff:192.0.2.1; the pattern of llguidance lacks this form.
_HEX = "[0-9a-fA-F]{1,4}"
_UP_TO = [f"(({_HEX}:){{0,{most - 1}}}{_HEX})?" if most else "" for most in range(8)]
_TAIL = rf"({_HEX}:{_HEX}|({_BYTE}\.){{3}}{_BYTE})"
_IPV6 = "|".join(
    (
        f"({_HEX}:){{6}}{_TAIL}",
        *(f"{_UP_TO[before]}::({_HEX}:){{{5 - before}}}{_TAIL}" for before in range(6)),
        f"{_UP_TO[6]}::{_HEX}",
        f"{_UP_TO[7]}::",
    )
)

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^{_DURATION}$",
    "email": f"^{_EMAIL}$",
    "ipv6": f"^({_IPV6})$",
}
KEPT_FORMATS = ("hostname", "ipv4", "uuid", "uri")

# The look-aheads at the beginning of Zod's pattern for emails, which `format: email` implies.
_ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)"
# The pattern of older versions of pydantic for a Decimal: a sign, and digits with a point. Its
# look-ahead demands a digit, as _decimal does.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\\d(\*|\{0,\d+\})\\\.\?\\d(\*|\{0,\d+\})(0\*)?\$"
)
_AROUND = re.compile(r"\(\?(<?[=!])")
_GROUP = re.compile(r"\\([1-9]|k<)")
_ESCAPED = re.compile(r"\\.", re.DOTALL)


def formatted(name: str) -> dict[str, str]:
    """Return the keywords that enforce a format; {} if the format is only an annotation."""
    if name in PATTERNS:
        return {"pattern": PATTERNS[name]}
    return {"format": name} if name in KEPT_FORMATS else {}


def checked_pattern(pattern: Any, of_format: Any = None) -> str:
    """Return `pattern` as llguidance reads it; ValueError if it cannot be enforced."""
    if not isinstance(pattern, str):
        msg = "must be a text"
        raise ValueError(msg)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        msg = "ends in a backslash that escapes nothing"
        raise ValueError(msg)
    kept: str = pattern.replace(_ZOD_EMAIL, "^", 1) if of_format == "email" else pattern
    if found := _DECIMAL.fullmatch(kept):
        kept = _decimal(found[1], found[2])
    plain = _ESCAPED.sub("", kept)
    if found := _AROUND.search(plain):
        msg = f"has {found[0]}...): look-around cannot be kept"
        raise ValueError(msg)
    if found := _GROUP.search(kept.replace("\\\\", "")):
        msg = f"has {found[0]}: references to groups cannot be kept"
        raise ValueError(msg)
    return kept


# The keyword that excludes all values that fit the bound of another one, the types that the bounds
# are about, and how far the new bound is from the old one.
OPPOSITES = {
    "minimum": ("exclusiveMaximum", ("integer", "number"), 0),
    "maximum": ("exclusiveMinimum", ("integer", "number"), 0),
    "exclusiveMinimum": ("maximum", ("integer", "number"), 0),
    "exclusiveMaximum": ("minimum", ("integer", "number"), 0),
    "minLength": ("maxLength", ("string",), -1),
    "maxLength": ("minLength", ("string",), 1),
    "minItems": ("maxItems", ("array",), -1),
    "maxItems": ("minItems", ("array",), 1),
}
# The longest texts that `other_texts` excludes, in characters together.
_MOST_OTHER_CHARS = 1000


def opposite(key: str, bound: Any, types: set[str]) -> Any:
    """Return a schema for the values of these types that a bound excludes.

    False = there are none, None = a grammar cannot enforce it.
    """
    name, of, step = OPPOSITES[key]
    kinds = sorted(types & set(of))
    if not kinds:
        return False
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return None
    if step:
        return {"type": kinds, name: int(bound) + step} if bound + step >= 0 else False
    try:
        return {"type": kinds, **number(name, bound, {}, whole=kinds == ["integer"])}
    except ValueError:
        return None


def other_texts(texts: list[str]) -> str | None:
    """Return a pattern for all texts except these; None if they are too long for a pattern."""
    if sum(map(len, texts)) > _MOST_OTHER_CHARS or max(map(len, texts)) > 100:
        return None
    return f"^({_others(set(texts))})$"


def _others(ends: set[str]) -> str:
    firsts = sorted({end[0] for end in ends if end})
    listed = "".join(map(_code, firsts))
    options = [] if "" in ends else [""]
    options.append(rf"[^{listed}][\s\S]*" if firsts else r"[\s\S]+")
    for char in firsts:
        after = {end[1:] for end in ends if end[:1] == char}
        options.append(f"{_code(char)}({_others(after)})")
    return "|".join(options)


def _code(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _decimal(whole: str, fraction: str) -> str:
    """Return a pattern of decimals. whole, fraction: how many digits: "*", or "{0,N}"."""
    before = "[0-9]+" if whole == "*" else "0" if whole == "{0,0}" else f"[0-9]{{1,{whole[3:]}"
    after = "[0-9]+" if fraction == "*" else f"[0-9]{{1,{fraction[3:]}"
    point = "" if fraction == "{0,0}" else rf"(\.{after})?"
    return f"^[+-]?{before}{point}$"


def names_pattern(names: dict[str, Any]) -> str | None:
    """Return one pattern for the keywords of propertyNames; None if this needs several patterns."""
    lengths = {key: names[key] for key in ("minLength", "maxLength") if key in names}
    if lengths and len(lengths) == len(names):
        low, high = lengths.get("minLength", 0), lengths.get("maxLength", "")
        return rf"^[\s\S]{{{int(low)},{high if high == '' else int(high)}}}$"
    if len(names) > 1:
        return None
    if "pattern" in names:
        return checked_pattern(names["pattern"])
    return PATTERNS.get(names.get("format", ""))


def check_value(value: Any) -> str:
    """Return why a grammar cannot enforce a value of const or enum exactly; "" if it can."""
    left = [value]
    while left:
        some = left.pop()
        if isinstance(some, float) and not math.isfinite(some):
            return "has a number that is larger than a double holds"
        if isinstance(some, int) and abs(some) > EXACT:
            try:
                exact = float(some) == some
            except OverflowError:
                exact = False
            if not exact:
                return f"has {str(some)[:40]}, which no double holds: numbers are exact up to 2^53"
        if isinstance(some, dict):
            left += some.values()
        elif isinstance(some, list):
            left += some
    return ""


def number(key: str, value: Any, schema: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return the bound `key` in keywords that llguidance can enforce; {} if it has no effect.

    whole: whether the values are integers. A bound that llguidance would round is tightened.

    Raises:
        ValueError: the bound cannot be enforced.
    """
    if isinstance(value, bool) and key.startswith("exclusive"):  # as in JSON Schema draft 4
        bound = schema.get(key[9:].lower())
        return number(key, bound, schema, whole=whole) if value and bound is not None else {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
        msg = f"is {json.dumps(value)[:100]}: it must be a number that a double holds"
        raise ValueError(msg)
    if key == "multipleOf":
        if value <= 0:
            msg = f"is {value}: it must be above 0"
            raise ValueError(msg)
        return {key: value}
    upper, exclusive = "aximum" in key, key.startswith("exclusive")
    sign = 1 if upper else -1
    edge = sign * value
    if edge >= (NO_INTEGER if whole else NO_NUMBER):
        return {}
    if edge <= -LARGEST:
        msg = f"is {value}: bounds beyond 64 bits cannot be kept"
        raise ValueError(msg)
    if whole:
        edge = math.ceil(edge) - 1 if exclusive else math.floor(edge)
        exclusive = False
    if edge > LARGEST:
        edge, exclusive = LARGEST, False
    name = ("exclusiveM" if exclusive else "m") + ("aximum" if upper else "inimum")
    return {name: sign * _inwards(edge)}


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits, too large for a double
        return False


def _inwards(edge: float) -> float:
    """Return the largest double that is at most `edge`, as an int if it is a whole number."""
    found = float(edge)
    if found > edge:
        found = math.nextafter(found, -math.inf)
    return int(found) if found.is_integer() else found
