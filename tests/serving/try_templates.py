"""Print how each chat template of a directory writes responses, and whether they are read back.

    python -m tests.serving.try_templates DIR [DIR ...]

For each *.jinja, one line of a Markdown table:

- calls: the format that was found; described: the template writes no calls, so that the system
  message describes the tools
- found: learned from the template's own calls, read (by a format of its own), or table
- right: how many of the messages the template renders, and the parser returns: with one and more
  calls, with and without arguments, with and without a text and a thought
- cuts: whether the pieces are the same for a cut at each byte, and for single characters
- thoughts: the tags, and whether the prompt begins a thought
- back: whether the next prompt has the call, its result and the thought
- forced: whether calls can be required, named and strict, and structured outputs have calls
  beside them: the grammars accept a call of the template and refuse other names
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from pathlib import Path

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.prompts.chat_prompt import begins_thought
from cpuserve.serving.tools import learn
from cpuserve.serving.tools import probe_conversations as probes
from cpuserve.serving.tools.base import WholeFormat
from cpuserve.serving.tools.families import HERMES
from cpuserve.serving.tools.use import response_structure, tool_use
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

OTHER = {
    "text": "a <b> c\n\n  d\u00e9, 'e'",
    "number": -3,
    "yes": False,
    "list": [],
    "object": {"k": "w"},
}
ONE, TWO = probes.NAMES
FULL = probes.ARGUMENTS
SIMPLE = {**OTHER, "text": "a <b> c"}
CALLS = {
    "one": [(ONE, FULL)],
    "two": [(ONE, FULL), (TWO, FULL)],
    "other": [(TWO, OTHER)],
    "empty": [(ONE, {})],
    "three": [(ONE, OTHER), (TWO, {}), (ONE, FULL)],
}
SAID, THOUGHT, RESULT = "I look", "It may be here.\n\nOr there.", "It is 17 degrees"
ASKED = [{"role": "user", "content": "Where is it?"}]
# What may follow a response: the tags that end the turn.
END = re.compile(r"(\s|<[^<>\s]{1,40}>|\[\w{1,40}\]|\[e~\[)*")
SPECIAL = re.compile(r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|<s>|</s>")
NEXT_TURN = re.compile(r"(?<=\w)\s*<[^<>\s]{1,40}>.*", re.DOTALL)


def behind_question(text):
    """The text after the question: before it, a template may write the time of day."""
    return text.rpartition(ASKED[0]["content"])[2]


def message(said, calls, thought, ids):
    """A turn of the assistant."""
    turn = {"role": "assistant", "content": said}
    if calls:
        turn["tool_calls"] = [
            {"id": ids(i, name), "type": "function", "function": {"name": name, "arguments": a}}
            for i, (name, a) in enumerate(calls)
        ]
    return turn | (dict.fromkeys(learn.THOUGHTS, thought) if thought else {})


class Trial:
    """The responses and prompts of one template."""

    def __init__(self, source):
        self.template = ChatTemplate(source, tokenizer())
        self.found = learn.learn_format(self.template)
        probe = probes.ProbeConversations(self.template)
        probe.find_ids()
        self.shows_tools, self.before, self.after = probe.shows_tools, probe._before, probe._after
        is_indexed = "functions." in probe.calls[0]["id"]
        self.ids = (
            (lambda i, n: f"functions.{n}:{i}") if is_indexed else (lambda i, _: f"call0000{i}")
        )
        tags, turns = self.found.tags or learn.THINK, self.found.turns
        markers = (self.found.calls or self.found.whole or HERMES).markers
        self.visible = [*markers, tags.open, tags.close, *(turns.marks if turns else ())]
        self.prompt = behind_question(self.render(ASKED, prompt=True) or "")
        self.thinks = begins_thought(self.prompt, tags)

    def render(self, messages, *, prompt=False, **kwargs):
        tools = probes.TOOLS if self.shows_tools else None
        try:
            return self.template.render(
                messages, add_generation_prompt=prompt, tools=tools, **kwargs
            )
        except InvalidRequest:
            return None

    def response(self, said, calls, thought):
        """(what follows the prompt, whether the prompt begins its thought), or None."""
        text = self.render([*ASKED, message(said, calls, thought, self.ids)])
        text = behind_question(text or "")
        if not text or not all(name in text for name, _ in calls):
            return None
        tags = self.found.tags or learn.THINK
        if text.startswith(self.prompt):
            begin = len(self.prompt)
        elif text.startswith(self.before):
            begin = len(self.before)
        else:
            same = os.path.commonprefix([text, self.before or self.prompt])
            begin = 1 + max(same.rfind(end) for end in (">", "]", "\n"))
        answer = text[begin:].removesuffix(self.after)
        answer = answer.removesuffix(probes._common_turn_end(answer, self.after))
        for token in set(SPECIAL.findall(answer)):  # as the server, which leaves special tokens out
            if not any(token in text for text in self.visible):
                answer = answer.replace(token, "")
        opened = begins_thought(text[:begin], tags) and tags.close in answer
        # An earlier thought may be written without the tag that the prompt has.
        opened |= (
            bool(thought)
            and tags.close in answer.replace(tags.open + tags.close, "")
            and tags.open not in answer
            and self.thinks
        )
        return answer, opened

    def parser(self, thinks, calls):
        found = self.found.calls if calls or self.found.whole is None else self.found.whole
        return (found or HERMES).parser(
            0, schemas=probes.SCHEMAS, around=self.found.around(thinks=thinks)
        )

    def told(self, texts, thinks, calls=True):
        """[thought, text, calls] of a response that comes in these pieces."""
        parser = self.parser(thinks, calls)
        pieces = [p for text in texts for p in parser.push(text)] + parser.flush()
        thought = "".join(p.text for p in pieces if isinstance(p, Thought))
        said = "".join(p.text for p in pieces if isinstance(p, Text))
        calls = []
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                if piece.name is not None:
                    calls.append([piece.name, ""])
                calls[-1][1] += piece.arguments
        return [thought, said, [(name, learn._loaded(text)) for name, text in calls]]

    def is_right(self, said, calls, thought):
        """Whether the response is read back; None if the template does not write it."""
        response = self.response(said, calls, thought)
        if response is None:
            return None
        text, thinks = response
        shown, spoken, read = self.told([text], thinks)
        if said and said not in text:  # some templates leave a text before calls out
            said = ""
        spoken = spoken.lstrip()
        if thought and thought.strip() not in text:
            thought = ""
        if self.found.whole is not None and calls:  # gpt-oss thinks what it says before a call
            shown, spoken = (shown or spoken), ""
            thought, said = thought or said, ""
        if calls and not all(name in text for name, _ in calls):
            return None
        rest = spoken[len(said) :] if spoken.startswith(said) else None
        if rest is not None and not END.fullmatch(rest) and NEXT_TURN.sub("", spoken) == said:
            rest = ""
        return shown == thought and rest is not None and bool(END.fullmatch(rest)) and read == calls

    def cuts(self, said, calls, thought):
        """Whether no cut of the response matters."""
        response = self.response(said, calls, thought)
        if response is None:
            return True
        text, thinks = response
        whole, data = self.told([text], thinks), text.encode()
        for cut in range(len(data)):
            decoder = codecs.getincrementaldecoder("utf-8")()
            if self.told([decoder.decode(data[:cut]), decoder.decode(data[cut:])], thinks) != whole:
                return False
        return self.told(text, thinks) == whole

    def given_back(self):
        """The parts of an earlier response that the next prompt has."""
        turn = message(SAID, CALLS["two"], THOUGHT, self.ids)
        results = [
            {"role": "tool", "tool_call_id": self.ids(i, n), "name": n, "content": f"{RESULT} {i}"}
            for i, (n, _) in enumerate(CALLS["two"])
        ]
        text = self.render([*ASKED, turn, *results], prompt=True)
        if text is None:
            one = {**turn, "tool_calls": turn["tool_calls"][:1]}
            text = self.render([*ASKED, one, results[0]], prompt=True)
        if text is None:
            return "fails"
        text = behind_question(text)
        parts = {"calls": ONE in text, "results": RESULT in text, "thought": THOUGHT in text}
        return " ".join(name for name, has in parts.items() if has)


_grammars = []


def allowed(form, text):
    """Whether a grammar allows a text as a whole."""
    if not _grammars:
        from cpuserve.engine.grammars.compiler import Compiler

        compiler = Compiler(tiny_model("llama"), 512, sorted(tiny_end_ids("llama")))
        _grammars.extend([compiler, Tokenizer.load(tiny_model("llama"))])
    compiler, loaded = _grammars
    matcher = compiler.compile(compiler.prepare(*form.key))
    ids = loaded.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def rests(text, opening):
    """What may follow a forced beginning in a response: with and without the end of the turn."""
    begin = opening.strip()
    if begin not in text:  # the opening has an id of the server, which differs
        begin = next((begin[-n:] for n in (12, 8, 6, 4) if begin[-n:] in text), "")
    found = [text[text.index(begin) + len(begin) :]]
    space = opening[len(opening.rstrip()) :]
    found = [found[0].removeprefix(space), found[0].removeprefix(space).rstrip()]
    while len(found) < 8 and "<" in found[-1]:
        found.append(found[-1].rpartition("<")[0].rstrip())
    return found


def used_for(trial, *, strict=True, **fields):
    """(the ToolUse, the form) of a call; if no grammar has open objects, it is not strict."""
    functions = [{**t["function"], "strict": strict} for t in probes.TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    call = GenerateCall(tools=tools, messages=[], **fields)
    try:
        used = tool_use(call, trial.found)
    except InvalidRequest:
        return used_for(trial, strict=False, **fields) if strict else (None, None)
    return used, response_structure(call, used)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}


def forced(trial):
    """Whether calls can be forced, named and strict, and structured outputs follow a thought.

    The grammar must accept the call that the template writes, and refuse another name.
    """
    if trial.found.calls is None:
        return "-"
    response = trial.response("", [(TWO, SIMPLE)], "")
    if response is None or TWO not in response[0]:
        return "generic" if trial.found.guided else "no call to compare"
    close = (trial.found.tags or learn.THINK).close
    _, thought, text = response[0].rpartition(close)  # without an empty thought
    text = text.lstrip() if thought else text.lstrip("\n")
    text = text if text.startswith((" to=", " ->")) else text.lstrip()
    ways = {
        "required": {"tool_choice": "required"},
        "named": {"tool_choice": "required", "tool_name": TWO},
        "strict": {},
        "form": FORM,
    }
    for way, fields in ways.items():
        used, form = used_for(trial, **fields)
        if used is None:
            return f"{way} is refused"
        if form is None:  # arguments are free, and the opening forces the rest
            continue
        texts = rests(text, used.opening)
        if not any(allowed(form, one) for one in texts):
            return f"NO, {way}: {texts[0][:60]!r}"
        others = [] if way == "named" else [one.replace(TWO, "another_name") for one in texts[:1]]
        if "form" in way:
            turns, whole = trial.found.turns, trial.found.whole
            header = whole.form_opening if whole else turns.text if turns else ""
            if not allowed(form, header + '{"a": 1}'):
                return "NO, form"
            others.append(header + '{"a": "x"}')
        if any(allowed(form, one) for one in others) and trial.found.calls.name != "llama3_json":
            return f"{way}: ANY NAME"
    return "yes"


def row(file):
    """(the cells of a template, whether it writes calls or thoughts, whether all is right)."""
    trial = Trial(file.read_text())
    found = trial.found
    told = [
        (said, calls, thought)
        for calls in CALLS.values()
        for said in ("", SAID)
        for thought in ("", THOUGHT)
    ]
    told += [(SAID, [], THOUGHT)]
    results = [trial.is_right(*one) for one in told] if found.calls is not None else []
    wrong = [one for one, result in zip(told, results, strict=False) if result is False]
    tries = [result for result in results if result is not None]
    same = found.calls is None or trial.cuts(SAID, CALLS["three"], THOUGHT)
    name = "-" if found.calls is None else found.calls.name
    described = trial.template.describes_tools
    why = found.why.replace("the system message describes tools, as the template does not; ", "")
    how = next((k for k in ("learned", "read back", "table", "asks") if k in why), why[:90])
    if described and trial.response("", CALLS["one"], None) is None:
        how = "described"
    tags = "-" if found.tags is None else repr(found.tags.open)[1:-1]
    thoughts = tags + (" open" * trial.thinks if found.tags else "")
    if isinstance(found.whole, WholeFormat):
        thoughts = "channels"
    cells = [
        file.stem[:48], name, how, f"{sum(tries)}/{len(tries)}", "same" if same else "DIFFER",
        thoughts, trial.given_back(), forced(trial),
    ]  # fmt: skip
    return cells, wrong, bool(tries) or found.calls is None


def main() -> int:
    """Print a line for each template."""
    files = sorted(file for folder in sys.argv[1:] for file in Path(folder).glob("*.jinja"))
    print("| template | calls | found | right | cuts | thoughts | back | forced |")
    print("|---|---|---|---|---|---|---|---|")
    counts = {}
    for file in files:
        try:
            cells, wrong, _ = row(file)
        except Exception as error:
            cells, wrong = [file.stem[:48], f"FAULT {type(error).__name__}: {error}"[:150]], []
            counts["fault"] = counts.get("fault", 0) + 1
        else:
            right = "wrong" if wrong or cells[4] == "DIFFER" else "right"
            counts[f"{cells[2]}, {right}"] = counts.get(f"{cells[2]}, {right}", 0) + 1
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
        for said, calls, thought in wrong[:4]:
            names = next((k for k, v in CALLS.items() if v == calls), "no calls")
            print(f"    wrong: {names}, {said!r}, {bool(thought)}", flush=True)
    print(f"{len(files)} templates:", counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
