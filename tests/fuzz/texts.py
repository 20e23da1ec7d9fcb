"""Targets: texts of models and clients: templates, tool calls, Modelfiles, sealed thoughts."""

from __future__ import annotations

import json
import random
from typing import TypedDict

from cpuserve.api.ollama.created.modelfile import read_modelfile, write_modelfile
from cpuserve.api.ollama.go_template import is_go_template, to_jinja
from cpuserve.api.ollama.parameters import sampling_of
from cpuserve.base.errors import RequestError, status_of
from cpuserve.serving.tools.learn import learn_format
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.rendering.client import Renderer
from tests.api.all_routes import SEAL
from tests.api.fakes import tokenizer
from tests.fuzz.edits import apply, draw
from tests.fuzz.json_edits import edited
from tests.helpers.family_templates import LEARNED, template
from tests.helpers.fuzzed_answers import changed, cuts
from tests.helpers.turn_templates import ALL as HEADED
from tests.serving.test_call_families import WRITTEN
from tests.serving.test_layouts import TOOLS
from tests.serving.test_parser_fuzz import NAMES, made, told

MOST_CHARS = 2000  # of an error


def line(error: RequestError) -> str:
    """Return the text of an error, which is short; names of a client may have line breaks."""
    said = str(error)
    assert status_of(error) < 500, said
    assert said, "an error without a text"
    assert len(said) <= MOST_CHARS, f"an error of {len(said)} characters: {said[:200]!r}"
    return f"{type(error).__name__}: {said}"


# --- chat templates -------------------------------------------------------------------------------
_JINJA = (
    "{{", "}}", "{%", "%}", "{#", "#}", "{%- for m in messages %}", "{%- endfor %}", "{% if x %}",
    "{% endif %}", "{% set x = messages %}", "{% set ns = namespace(a=1) %}", "messages[0]",
    "|tojson", "| join", "range(10**9)", "'a' * 10**9", "9**9**9", "x.__class__.__mro__",
    "''.format_map(x)",
    "{% macro f(a) %}", "{% endmacro %}", "{{ f(f) }}", "loop.previtem", "raise_exception('a')",
    "{% include 'a' %}", "{% import 'os' as os %}", "cycler", "lipsum", "joiner",
    "{% generation %}",
    "| map(attribute='content')", "| selectattr('role')", "strftime_now('%s' * 9)", "{% break %}",
    "{% set messages[0].content = 1 %}", "| replace('', 'a' * 999)", "| indent(10**9)",
    "is defined",
    "| sum(start=[])", "{% call f() %}{% endcall %}", "{% filter upper %}", "{% raw %}", "self",
    "~",
)  # fmt: skip
_TEXT = {"role": "user", "content": [{"type": "text", "text": "a"}]}
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}
CONVERSATION = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        _TEXT,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "18"},
        {"role": "user", "content": "hi"},
    ],
    "tools": TOOLS,
    "documents": [],
    "add_generation_prompt": True,
    "enable_thinking": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


class TemplateCase(TypedDict):
    """learns: whether the template is also examined as at the start of a server."""

    source: str
    variables: str
    learns: bool


class TemplateBench:
    """Templates and conversations, in the processes that render: a text, or a line of error."""

    most_bytes, most_cpu_s = 1 << 29, 5.0

    def __init__(self) -> None:
        self._renderer = Renderer(cpu_s=2.0)
        self._sources = [template(name) for name in LEARNED]
        self._sources += [HEADED[name][0] for name in HEADED]

    def draw(self, rng: random.Random) -> TemplateCase:
        """Return a random case."""
        source = rng.choice(self._sources)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(source) + 1)
            source = source[:at] + rng.choice(_JINJA) + source[at:]
        if rng.random() < 0.5:
            source = changed(source, rng.random(), tuple(self._sources))
        variables = json.dumps(CONVERSATION).encode()
        if rng.random() < 0.7:
            body = edited(rng, variables, {}, [variables])
            variables = body if _is_object(body) else variables
        return {
            "source": source,
            "variables": variables.decode("utf-8", "surrogatepass"),
            "learns": rng.random() < 0.1,
        }

    def outcome(self, case: TemplateCase) -> str:
        """What a template comes to.

        Raises:
            Exception: something else than a text or one line, or a template that no longer renders.
        """
        try:
            self._renderer.render(case["source"], json.loads(case["variables"]))
            said = "rendered"
        except RequestError as error:
            said = line(error)
        assert self._renderer.render("{{ a }}", {"a": "b"}) == "b"
        if case["learns"]:
            said += ", " + self._learned(case["source"])
        return said

    def _learned(self, source: str) -> str:
        try:
            learn_format(ChatTemplate(source, tokenizer()))
        except RequestError as error:
            return line(error)
        return "learned"

    def close(self) -> None:
        """End the processes."""
        self._renderer.close()


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


# --- tool calls -----------------------------------------------------------------------------------
class CallCase(TypedDict):
    """name: of a parser (test_parser_fuzz.py). cut: the seed of the pieces of the text."""

    name: str
    text: str
    cut: int


class CallBench:
    """Responses with calls through each parser: in pieces they say the same as in one piece."""

    most_bytes, most_cpu_s = 1 << 29, 5.0

    def draw(self, rng: random.Random) -> CallCase:
        """Return a random case."""
        name = rng.choice(NAMES)
        text = changed(made(name)[1], rng.random(), tuple(WRITTEN.values()))
        return {"name": name, "text": text, "cut": rng.getrandbits(32)}

    def outcome(self, case: CallCase) -> str:
        """How many calls a response has, and whether it ends with one.

        Raises:
            AssertionError: the pieces have other events than the whole text.
        """
        new, _ = made(case["name"])
        whole = told(new(), [case["text"]])
        assert told(new(), cuts(case["text"], case["cut"])) == whole, "another cut, another result"
        _, closed, calls, ends, thinks = whole
        return f"{min(closed, 2)} of {min(calls, 3)} calls, {ends=}, {thinks=}"

    def close(self) -> None:
        """Nothing is kept."""


# --- Modelfiles -----------------------------------------------------------------------------------
_GO = (
    "{{ if .System }}<|sys|>{{ .System }}{{ end }}{{ if .Prompt }}{{ .Prompt }}{{ end }}",
    '{{- range $i, $_ := .Messages }}{{ if eq .Role "user" }}{{ .Content }}{{ end }}{{ end }}',
    "{{ range .Messages }}{{ len (slice $.Messages 1) }}{{ else }}{{ `a` }}{{ end }}{{ .Response }}",  # noqa: E501
)
_MESSAGES = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."})
_PARAMETERS = 'temperature 0.5\nnum_ctx 4096\nstop <|a|>\nstop " b"\nseed 7\nmirostat 2\ntop_k 4'
_LINES = (
    'SYSTEM """', '"""', 'SYSTEM "', "FROM", "FROM tiny", "# a", "PARAMETER stop",
    "PARAMETER num_ctx",
    "PARAMETER temperature nan", "PARAMETER top_k 1e999", "PARAMETER seed " + "9" * 5000, "MESSAGE",
    "MESSAGE user", "MESSAGE tool a", "ADAPTER ./a", "LICENSE", "TEMPLATE {{", "REQUIRES 1", "X",
    "\r",
    "PARAMETER penalize_newline true", "FROM ../../etc/passwd", "PARAMETER temperature inf", "\x85",
    "PARAMETER temperature 1_0", "PARAMETER seed \u0661", "\u2028FROM b", '"', '"" ""', "\0",
)  # fmt: skip


class ModelfileBench:
    """Modelfiles with templates in Go's syntax: fields of /api/create, or an error of one line."""

    most_bytes, most_cpu_s = 1 << 29, 5.0

    def draw(self, rng: random.Random) -> str:
        """Return the text of a random Modelfile."""
        go = rng.choice(_GO)
        if rng.random() < 0.5:
            go = changed(go, rng.random(), _GO)
        written = write_modelfile(
            "tiny",
            system=rng.choice(("", "Be kind.", 'a """ b', "a\nb")),
            template=go,
            parameters=_PARAMETERS,
            messages=_MESSAGES,
            licenses=["MIT"],
        )
        lines = written.split("\n")
        for _ in range(rng.randrange(4)):
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(_LINES))
        text = "\n".join(lines)
        return changed(text, rng.random()) if rng.random() < 0.5 else text

    def outcome(self, text: str) -> str:
        """What a Modelfile comes to: "read", and what its template and its parameters come to.

        Raises:
            Exception: something else than fields or errors of one line.
        """
        try:
            found = read_modelfile(text)
            json.dumps(found).encode()
            sampling_of(found["parameters"])
            source = found.get("template", "")
            if is_go_template(source):
                json.dumps(to_jinja(source))
        except RequestError as error:
            return line(error)
        return "read"

    def close(self) -> None:
        """Nothing is kept."""


# --- sealed thoughts ------------------------------------------------------------------------------
class SealedBench:
    """Sealed thoughts that were changed: only what this server has written is opened."""

    most_bytes, most_cpu_s = 1 << 29, 5.0

    def __init__(self) -> None:
        thoughts = ("", "Hm.", "\u00e9\n" * 300, "a" * 100_000)
        self._texts = [SEAL.sealed(thought) for thought in thoughts]
        self._packed = [SEAL.packed(text) for text in self._texts]

    def draw(self, rng: random.Random) -> str:
        """Return a random text."""
        text = rng.choice(self._texts)
        data = text.encode()
        if rng.random() < 0.5:
            data = apply(draw(rng, {"sealed.gguf": data}), "sealed.gguf", data)
        else:
            data = changed(text, rng.random(), tuple(self._texts)).encode("utf-8", "replace")
        return data.decode("utf-8", "replace")

    def outcome(self, text: str) -> str:
        """Return "opened" for a text of this server, else "refused".

        Raises:
            AssertionError: another text was opened.
        """
        packed = SEAL.packed(text)
        # The last characters of base64 have bits without a meaning, so several texts are the same.
        assert packed in self._packed if packed else text not in self._texts, packed
        return "refused" if packed is None else "opened"

    def close(self) -> None:
        """Nothing is kept."""
