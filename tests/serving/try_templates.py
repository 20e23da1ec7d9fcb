"""Print how each chat template of a directory writes calls, and whether they are read back.

    python tests/serving/try_templates.py DIR [DIR ...]

For each *.jinja: the format that was found and how; and for responses with one and with two calls,
with and without a text, whether the parser returns the message: whole, and cut at every character.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cpuserve.serving.events import Text, ToolCallDelta
from cpuserve.serving.tools import FORMATS, learn
from cpuserve.serving.tools.thoughts import Around
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer


def told(found, around, texts):
    """Return what the parser tells of a response that comes in these pieces."""
    parser = found.parser(0, schemas=learn._SCHEMAS, around=around)
    pieces = [p for text in texts for p in parser.push(text)] + parser.flush()
    said = "".join(p.text for p in pieces if isinstance(p, Text))
    calls = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
    return said, [(name, learn._loaded(text)) for name, text in calls]


def tried(template):
    """Return the format, how it was found, and the results of the four responses."""
    found = learn.learn_format(template)
    if found.calls is None:
        return None, found.why, []
    probe = learn._ProbeConversations(template)
    around = Around(found.gap, found.tags or Around().tags)
    results = []
    for text in ("", learn._TEXT):
        for count in (1, 2):
            answer = probe.answer(text, count, whole=found.calls not in FORMATS)
            if answer is None:
                results.append("-")
                continue
            whole = told(found.calls, around, [answer])
            wanted = [(name, learn._ARGUMENTS) for name in learn._NAMES[:count]]
            right = whole[1] == wanted and text in (whole[0], learn._TURN.sub("", whole[0]), "")
            dropped = whole[1] == wanted and whole[0] == ""
            same = told(found.calls, around, list(answer)) == whole
            results.append(("yes" if right or dropped else "NO") + ("" if same else " CUT"))
    return found.calls.name, found.why, results


def main() -> int:
    """Print a line for each template."""
    files = sorted(file for folder in sys.argv[1:] for file in Path(folder).glob("*.jinja"))
    print(f"{'template':50} {'format':14} {'one':4} {'two':4} {'text+1':6} {'text+2':6} how")
    right = 0
    for file in files:
        name, why, results = tried(ChatTemplate(file.read_text(), tokenizer()))
        right += bool(results) and set(results) <= {"yes", "-"}
        shown = " ".join(result.ljust(5) for result in results or ["-"] * 4)
        print(f"{file.stem[:50]:50} {name or '-':14} {shown} {why[:160]!r}")
    print(f"{right} of {len(files)} templates are read back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
