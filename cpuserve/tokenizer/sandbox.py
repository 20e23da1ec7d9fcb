"""A Jinja environment that isolates templates from Python and limits their time and memory.

Jinja's immutable sandbox blocks unsafe attributes, but it allows 10 ** 10 ** 10 and loops of a
billion iterations. Here every iteration, call, operator and output is charged to a budget per
render, so any template ends in bounded time and memory.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

# Real templates need a few operations per message and copy each text a few times.
STEPS = 1_000_000
STEPS_PER_CHAR = 1
CHARS = 16_000_000
CHARS_PER_CHAR = 64
SECONDS = 5.0
# Far above every padding, field width, precision and repeat count in real templates.
MAX_COUNT = 100_000
MAX_INT_BITS = 256
_CONTAINERS = (list, tuple, dict, set, frozenset)
_SIZED = (str, bytes, *_CONTAINERS)


class BudgetExceeded(TemplateError):
    """A template was stopped because it exceeded its budget."""


class Budget:
    """The remaining budget of one render: operations, produced characters and seconds.

    It also limits the size of each list or dict when written out as text. A list that contains the
    same list twice, nested forty times, is small in memory, but comparing it would take for ever.
    """

    def __init__(self, input_chars: int, seconds: float = SECONDS) -> None:
        self._steps = STEPS + STEPS_PER_CHAR * input_chars
        self._chars = self._max_weight = CHARS + CHARS_PER_CHAR * input_chars
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        # id -> (container, written size); the reference prevents reuse of the id
        self._weights: dict[int, tuple[Any, int]] = {}

    def step(self) -> None:
        """Charge one operation."""
        self._steps -= 1
        if self._steps < 0:
            _stop("too many operations")
        if time.monotonic() > self._deadline:
            _stop(f"it took more than {self._seconds:g} s")

    def produce(self, size: int) -> None:
        """Charge `size` characters or elements before they are created."""
        self._chars -= size
        if self._chars < 0:
            _stop("too much text")

    def weigh(self, value: Any) -> int:
        """Number of characters and elements of `value` when written out; cached per container."""
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            self.produce(len(value))
            items = [*value, *value.values()] if isinstance(value, dict) else value
            weight = len(value) + sum(map(self.weigh, items))
            if weight > self._max_weight:
                _stop("too much text")
            self._weights[id(value)] = known = (value, weight)
        return known[1]


def _stop(why: str) -> NoReturn:
    msg = f"the chat template was stopped: {why}"
    raise BudgetExceeded(msg)


_budget: ContextVar[Budget] = ContextVar("chat_template_budget")


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Charge all template work inside this block to `budget`."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def _charge(value: Any) -> Any:
    """Charge one operation and the size of `value`; returns `value`."""
    budget = _budget.get()
    budget.step()
    if isinstance(value, str | bytes):
        budget.produce(len(value))
    else:
        budget.weigh(value)
    return value


def _charge_text(*values: Any) -> None:
    """Charge the size of these values when written out as text."""
    budget = _budget.get()
    budget.produce(sum(map(budget.weigh, values)))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    _charge_text(value)
    return str(value)


@pass_context
def _finalize(_context: Context, value: Any) -> Any:
    # A function that takes the context is not called by Jinja during compilation.
    return _charge(_text(value))


class _Accounting(Extension):
    """A Jinja extension that renders the content of `{% generation %}` (a mask for training)."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment that chat templates expect, with all work charged to a Budget."""

    intercepted_binops = frozenset({"*", "+", "**", "%"})

    def __init__(self) -> None:
        # optimized=False: otherwise Jinja evaluates constants during compilation, without a charge.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Accounting],
        )
        self.filters = {
            name: _guarded(name, _FILTER_SIZES.get(name, _no_size), function)
            for name, function in self.filters.items()
            if name not in _DROPPED_FILTERS
        }
        self.filters["tojson"] = _guarded("tojson", _no_size, _to_json)
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Charging().visit(super()._parse(source, name, filename))
        return tree

    @staticmethod
    def charged_step() -> None:
        """Charge one iteration of a loop."""
        _budget.get().step()

    @staticmethod
    def charged_literal(value: Any) -> Any:
        """Charge a list, tuple or dict literal of the template."""
        return _charge(value)

    @staticmethod
    def charged_concat(*values: Any) -> str:
        """Charge and compute values[0] ~ values[1] ~ ..."""
        texts = [_text(v) for v in values]
        _budget.get().produce(sum(map(len, texts)))
        return _charge("".join(texts))  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be too big; otherwise compute and charge it."""
        budget = _budget.get()
        budget.step()
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            budget.produce(_product_size(left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            _check_percent_format(left)
            _charge_text(right)
        result = super().call_binop(context, operator, left, right)
        return _charge(result)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge the call; for string methods, refuse results that would be too big beforehand."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            size = _METHOD_SIZES.get(__obj.__name__, _no_size)(owner, *args, **kwargs)
            _budget.get().produce(size)
        return _charge(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's sandboxed str.format, which also checks widths and charges the arguments."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_brace_format(template)
            _charge_text(*args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return checked


class _Charging(NodeTransformer):
    """Inserts charges where the sandbox has no hook: loop iterations, "~" and literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Charge each iteration."""
        self.generic_visit(node)
        turn = _charged_call("charged_step", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace "~" by a method that charges its result."""
        self.generic_visit(node)
        return _charged_call("charged_concat", list(node.nodes), node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Charge a tuple, unless it is the target of an assignment."""
        return self._literal(node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Charge a list."""
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Charge a dict."""
        return self._literal(node)

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _charged_call("charged_literal", [node], node.lineno)


def _charged_call(method: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(target, args, [], None, None, lineno=lineno)


def _count(value: Any) -> int:
    """A width or repeat count from a template; refused if it exceeds MAX_COUNT."""
    if not isinstance(value, int):
        return 0
    if value > MAX_COUNT:
        _stop(f"a width or count of {str(value)[:20] if value < 10**20 else 'over 10^20'}")
    return max(0, int(value))


def _product_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            _stop("a number too big")
        return 0
    for text, times in ((left, right), (right, left)):
        if isinstance(text, _SIZED) and isinstance(times, int):
            return len(text) * max(0, times)
    return 0


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = max(1, left.bit_length()) * max(0, right) if right < 10_000 else MAX_INT_BITS + 1
        if bits > MAX_INT_BITS:
            _stop("a number too big")


_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +_^]*(\*|\d+)?(?:\.(\*|\d+))?")


def _check_percent_format(text: str | bytes) -> None:
    """Refuse formats such as "%999999999d" and "%*d", which could create any amount of text."""
    spelled = text if isinstance(text, str) else text.decode("latin-1")
    for match in _PERCENT.finditer(spelled):
        for width in match.groups(default="0"):
            _count(MAX_COUNT + 1 if width == "*" else int(width[:20]))


def _check_brace_format(text: str) -> None:
    """Refuse formats such as "{:999999999}" and "{:{}}", which could create any amount of text."""
    for _literal, _name, spec, _conversion in Formatter().parse(text):
        if spec and "{" in spec:
            _count(MAX_COUNT + 1)
        for digits in re.findall(r"\d+", spec or ""):
            _count(int(digits[:20]))


def _no_size(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _padded_size(text: Any, *args: Any, **kwargs: Any) -> int:
    """Size of center, ljust ...: that of the text plus any count among the arguments."""
    counts = [_count(a) for a in (*args, *kwargs.values())]
    lines = text.count("\n") + 1 if isinstance(text, str) else 1
    return (len(text) if isinstance(text, _SIZED) else 0) + lines * sum(counts)


def _indented_size(text: Any, *args: Any, **kwargs: Any) -> int:
    widths = [len(a) for a in (*args, *kwargs.values()) if isinstance(a, str)]
    lines = text.count("\n") + 1 if isinstance(text, str) else 1
    return _padded_size(text, *args, **kwargs) + lines * sum(widths)


def _expanded_size(text: Any, *args: Any, **kwargs: Any) -> int:
    tabs = text.count("\t" if isinstance(text, str) else b"\t")
    counts = [_count(a) for a in (*args, *kwargs.values())] or [8]
    return len(text) + int(tabs) * sum(counts)


def _replaced_size(text: Any, old: Any, new: Any, *_args: Any, **_kwargs: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old) if old else len(text) + 1
    return len(text) + times * len(new)


def _joined_size(separator: Any, items: Any, *_args: Any, **_kwargs: Any) -> int:
    if not isinstance(items, list | tuple | dict | set | str):
        return 0
    return len(separator) * len(items) + _budget.get().weigh(items)


def _join_filter_size(items: Any, d: Any = "", *_args: Any, **_kwargs: Any) -> int:
    return _joined_size(str(d), items)


def _formatted_size(text: Any, *args: Any, **kwargs: Any) -> int:
    if isinstance(text, str):
        _check_percent_format(text)
    values = (*args, *kwargs.values())
    return sum(len(v) for v in values if isinstance(v, str)) + MAX_COUNT


_METHOD_SIZES: Mapping[str, Callable[..., int]] = {
    "center": _padded_size,
    "ljust": _padded_size,
    "rjust": _padded_size,
    "zfill": _padded_size,
    "expandtabs": _expanded_size,
    "replace": _replaced_size,
    "join": _joined_size,
}
_FILTER_SIZES: Mapping[str, Callable[..., int]] = {
    "center": _padded_size,
    "indent": _indented_size,
    "replace": _replaced_size,
    "join": _join_filter_size,
    "format": _formatted_size,
    "batch": _padded_size,
    "slice": _padded_size,
    "round": _padded_size,
}
# Removed: not useful in chat templates, and of quadratic cost or random.
_DROPPED_FILTERS = frozenset({"pprint", "random", "xmlattr", "urlize", "sum", "wordwrap"})
# Filters that iterate over a container; all other filters first write it out as text.
_CONTAINER_FILTERS = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items"),
        *("last", "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse"),
        *("select", "selectattr", "slice", "sort", "unique"),
    }
)


def _guarded(name: str, size: Callable[..., int], function: Callable[..., Any]) -> Any:
    """A filter with charges for its predicted result before the call and the actual one after."""
    # Jinja passes its context or environment as first argument to functions with this attribute.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        if name not in _CONTAINER_FILTERS:
            _charge_text(*(v for v in (*args[first:], *kwargs.values()) if not isinstance(v, str)))
        _budget.get().produce(size(*args[first:], **kwargs))
        return _charge(function(*args, **kwargs))

    return charged


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's tojson, as in the training data of models."""
    # These are written for each element, so they may have at most a hundred characters.
    _count((indent if isinstance(indent, int) else len(indent or "")) * 1000)
    for separator in separators or ():
        _count(len(separator) * 1000)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message)[:1000])


def _strftime_now(form: Any) -> str:
    _check_percent_format(str(form))
    return datetime.now().strftime(str(form)[:1000])  # local time, as transformers
