"""A server whose model follows a script in the user's text (script.py).

`python -m tests.clients.scripted PORT` serves until a signal stops it; `--help` lists the options.
Tests use `serving` in an event loop, or `scripted_server` with clients that block. The server is
the one of cpuserve.testing, with a tokenizer of four characters a token.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuserve.testing.replies import ScriptedReply
from cpuserve.testing.script import BLOCK, Responder, ScriptedRequest
from cpuserve.testing.scripted_server import (
    MAX_MODEL_LEN,
    ScriptedServer,
    ScriptedSettings,
    script_thread,
    serving_script,
)
from cpuserve.testing.vocabulary import trained
from cpuserve.testing.writing import TEMPLATE
from cpuserve.tokenizer.parts import Parts, special_ids_of
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.clients.script import written

__all__ = ["BLOCK", "NAMES", "Settings", "scripted_server", "serving", "tokenizer"]

ROOT = Path(__file__).parents[2]
NAMES = ("scripted",)
# How the template writes a content, and what it does in a model that reads pictures.
_TEXT = "{{- m.content or '' }}"
_PARTS = (
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for p in m.content or [] %}"
    "{{- p.text if p.type == 'text' else '<image>' }}{%- endfor %}{%- endif %}"
)
_PICTURE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>"]
_PICTURE_TOKENS += [f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7)]


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE, trained on this project's pages: about four characters a token."""
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    return trained(page.read_text(encoding="utf-8") for page in pages)


@functools.cache
def seeing_tokenizer() -> Tokenizer:
    """The same tokenizer with the special tokens of SmolVLM."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Core

    plain = tokenizer()
    core = Core.from_str(plain._coder._core.to_str())
    core.add_special_tokens([AddedToken(each, normalized=False) for each in _PICTURE_TOKENS])
    size = core.get_vocab_size(with_added_tokens=True)
    known = dict(plain.special_tokens)
    return Tokenizer(Parts(core, "byte_level", size, special_ids_of(core), special_tokens=known))


def responder(*, thinks: bool) -> Responder:
    """Return a function that writes what the prompt says.

    thinks: every response begins with a thought.
    """

    def respond(request: ScriptedRequest) -> ScriptedReply:
        return ScriptedReply(raw=written(request.prompt, thinks=thinks))

    return respond


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScriptedSettings):
    """How a server is made.

    thinks: every response begins with a thought.
    sees: the model reads pictures, in the way of SmolVLM.
    """

    names: Sequence[str] = NAMES
    thinks: bool = False
    sees: bool = False
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            made = seeing_tokenizer() if self.sees else tokenizer()
            object.__setattr__(self, "tokenizer", made)


@asynccontextmanager
async def serving(settings: Settings | None = None, **fields: Any) -> AsyncIterator[ScriptedServer]:
    """Run a server in this event loop. fields: those of Settings."""
    settings = settings or Settings(**fields)
    async with serving_script(settings, responder(thinks=settings.thinks)) as server:
        if settings.sees:
            _let_see(server)
        yield server


@contextmanager
def scripted_server(settings: Settings | None = None, **fields: Any) -> Iterator[ScriptedServer]:
    """Run a server in a thread with an event loop of its own. fields: those of Settings."""
    settings = settings or Settings(**fields)
    with script_thread(settings, responder(thinks=settings.thinks)) as server:
        if settings.sees:
            _let_see(server)
        yield server


def _let_see(server: ScriptedServer) -> None:
    """Let the model of a server read pictures: templates write IMAGE for each of them."""
    from cpuserve.media.readers.pictures import PictureReader
    from cpuserve.serving.media.reader import MediaReader, MediaRules
    from cpuserve.tokenizer.chat import ChatTemplate
    from tests.helpers.drawn import SMALL

    context = server.context
    known = context.get_tokenizer()
    assert _TEXT in TEMPLATE
    context.set_ready(known, ChatTemplate(TEMPLATE.replace(_TEXT, _PARTS), known))
    context.media = MediaReader({"image": PictureReader(SMALL, 64)}, known, MediaRules())


async def _main(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(settings) as server:
        print("ready", server.url, flush=True)
        await stop.wait()


def main() -> None:
    """Serve with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.scripted")
    parser.add_argument("port", type=int, help="port on 127.0.0.1; 0 = a free one")
    parser.add_argument("--names", default=",".join(NAMES), help="served names, with commas")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, metavar="TOKENS")
    parser.add_argument("--thinks", action="store_true", help="begin responses with a thought")
    parser.add_argument("--sees", action="store_true", help="read pictures")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="per output")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep requests and responses")
    given = parser.parse_args()
    settings = Settings(
        names=tuple(given.names.split(",")),
        max_model_len=given.max_model_len,
        thinks=given.thinks,
        sees=given.sees,
        pace_s=given.pace,
        port=given.port,
        record=given.record,
    )
    asyncio.run(_main(settings))


if __name__ == "__main__":
    main()
