"""Responses of `run` and `chat`: Markdown on a terminal, and files in messages."""

import base64
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from cpuserve.base.errors import ConfigError
from cpuserve.cli import main as cli
from cpuserve.cli import terminal
from cpuserve.cli.attachments import content_of, converted, part_of
from cpuserve.cli.chat import Conversation
from cpuserve.cli.markdown import MarkdownStream, end_of_blocks
from cpuserve.cli.session import ReplyPrinter
from cpuserve.tokenizer.conversation import MediaPart
from tests.api.sees import write_served_model
from tests.helpers.drawn import png
from tests.helpers.tiny import tiny_model

TEXT = "# Title\n\nSome **bold** words.\n\n```python\nx = 1\n\ny = 2\n```\n\n- one\n- two\n"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\n", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nnext", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n~~~\n\n", "~~~\n```\n\n~~~\n\n"),
        ("a\n\nb\n\nc", "a\n\nb\n\n"),
    ],
)
def test_a_block_ends_with_a_blank_line_outside_of_a_fence(text, block):
    assert text[: end_of_blocks(text)] == block


def shown(pieces, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=60, height=20, **options)
    drawn = MarkdownStream(console)
    for piece in pieces:
        drawn.add(piece)
    drawn.close()
    return stream.getvalue()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_layout_does_not_depend_on_the_pieces_in_which_the_text_arrives(size):
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    lines = [line.rstrip() for line in shown(pieces).splitlines() if line.strip()]
    whole = [line.rstrip() for line in shown([TEXT]).splitlines() if line.strip()]
    assert lines == whole
    assert "Some bold words." in lines
    assert not any("**" in line or "```" in line for line in lines)
    assert "\x1b[1m" in shown(pieces, force_terminal=True)


def test_only_a_terminal_that_draws_gets_markdown(monkeypatch, capsys):
    screen = io.StringIO()
    screen.isatty = lambda: True
    for term, draws in (("xterm", True), ("dumb", False), ("", True)):
        monkeypatch.setattr(terminal, "environment", lambda term=term: {"TERM": term})
        assert terminal.draws(screen) is draws
    printer = ReplyPrinter(markdown=True)  # standard output is no terminal here
    printer.say("**a**")
    printer.finish(1, 1)
    assert capsys.readouterr().out == "**a**"


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_thoughts_are_not_dimmed_where_nobody_wants_colours(monkeypatch, variables):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(terminal.sys, "stderr", screen)
    monkeypatch.setattr(terminal, "environment", lambda: variables)
    terminal.whisper("hm")
    assert screen.getvalue() == "hm"


def test_files_become_parts_of_a_message(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.txt").write_text("a text")
    parts = [part_of(str(tmp_path / name)) for name in ("a.png", "b.txt")]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert base64.b64decode(parts[0]["image_url"]["url"].partition(",")[2]) == PNG
    assert parts[1]["file"]["filename"] == "b.txt"
    assert content_of("hi", []) == "hi"
    content = content_of("hi", parts)
    assert content[-1] == {"type": "text", "text": "hi"}
    (message,) = converted([{"role": "user", "content": content}])
    picture, text, said = message["content"]
    assert isinstance(picture, MediaPart)
    assert (picture.kind, picture.why) == ("image", "")
    assert "a text" in str(text)
    assert said == {"type": "text", "text": "hi"}


def test_a_file_that_cannot_be_sent_says_why(tmp_path, monkeypatch, capsys):
    for name in ("absent.png", str(tmp_path), "a\0b"):
        with pytest.raises(ConfigError, match=r"there is no such file|cannot be read"):
            part_of(name)
    monkeypatch.setattr("cpuserve.cli.attachments.MOST_BYTES", 3)
    (tmp_path / "large.png").write_bytes(PNG)
    with pytest.raises(ConfigError, match="has more than"):
        part_of(str(tmp_path / "large.png"))
    parsed = cli.build_parser().parse_args(["run", "--image", "a.png", "--image", "b.pdf", "m"])
    assert parsed.image == ["a.png", "b.pdf"]


def test_a_chat_sends_its_files_with_the_next_message_only(tmp_path, capsys):
    import asyncio

    (tmp_path / "a.png").write_bytes(PNG)
    calls = []

    async def stream(call):
        calls.append(call)
        return "seen"

    conversation = Conversation(SimpleNamespace(name="m", stream=stream), None, {})

    async def talk():
        assert await conversation.take("/image nowhere.png")
        assert await conversation.take(f"/image {tmp_path / 'a.png'}")
        assert await conversation.take("what is this?")
        assert await conversation.take("and now?")

    asyncio.run(talk())
    assert "there is no such file" in capsys.readouterr().err
    first, second = (call.messages[-1]["content"] for call in calls)
    assert [part["type"] for part in first] == ["image_url", "text"]
    assert second == "and now?"
    assert calls[1].messages[0]["content"] == first, "the model still sees the picture"


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """Return the path of a tiny model that reads pictures."""
    return str(write_served_model(tmp_path_factory.mktemp("sees")).path)


def test_a_model_here_reads_the_picture_of_a_message(sees, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(png())
    words = ["chat", sees, "--message", "what is this", "--max-model-len=512", "--max-tokens=4"]
    prompts = []
    for more in ([], ["--image", str(tmp_path / "a.png")]):
        assert cli.main([*words, *more]) == 0
        prompts.append(capsys.readouterr().out)
    assert all(prompts)
    assert prompts[0] != prompts[1]


def test_a_model_of_texts_refuses_a_picture_with_a_line(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(png())
    words = ["--message", "hi", "--image", str(tmp_path / "a.png"), "--max-tokens=4"]
    assert cli.main(["chat", str(tiny_model("llama")), *words]) == 1
    assert "this model reads text only" in capsys.readouterr().err
