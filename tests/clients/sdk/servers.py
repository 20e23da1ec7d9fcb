"""The servers that flows need: the scripted one, and real ones with small models."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpuserve.sampling.params import SamplingParams
from tests.api.fakes import FakeEngine, Script, Step
from tests.clients.scripted import NAMES, scripted_server, tokenizer
from tests.clients.sdk.server import Server
from tests.helpers.embedder import embedding_model
from tests.helpers.rerankers import reranker
from tests.helpers.served import DEFAULT_MODEL, default_model, running_server
from tests.helpers.tiny import tiny_model


@contextmanager
def scripted() -> Iterator[Server]:
    """The scripted model; `folder` has the prompts that it got, as files in their order."""
    with tempfile.TemporaryDirectory() as folder, scripted_server() as running:
        running.engine.script = _kept(running.engine.script, Path(folder))
        yield Server(running.url, NAMES[0], folder=folder)


def _kept(script: Script, folder: Path) -> Script:
    """Return the script, which first writes each prompt into a file."""

    def keeps(
        engine: FakeEngine, number: int, prompt: list[int], params: SamplingParams
    ) -> Iterator[Step]:
        text = tokenizer().decode(prompt, skip_special_tokens=False)
        (folder / f"{number:06}").write_text(text, encoding="utf-8")
        yield from script(engine, number, prompt, params)

    return keeps


@contextmanager
def vectors() -> Iterator[Server]:
    """A tiny model that embeds, and a tiny one that ranks."""
    also = ("--also-serve", f"ranks={reranker('xlm-roberta')}")
    with running_server(embedding_model("mean"), "--served-model-name", "embeds", *also) as found:
        yield Server(found.url, embedder="embeds", reranker="ranks")


@contextmanager
def tiny() -> Iterator[Server]:
    """A tiny model that generates; `folder` has its tokenizer."""
    path = tiny_model("llama")
    with running_server(path, "--served-model-name", "tiny") as found:
        yield Server(found.url, "tiny", folder=str(path))


@contextmanager
def smollm2() -> Iterator[Server]:
    """The built-in model."""
    default_model()
    with running_server(DEFAULT_MODEL) as found:
        yield Server(found.url, DEFAULT_MODEL)


@contextmanager
def pair() -> Iterator[Server]:
    """A tiny model that embeds ("embeds"), and a tiny one that generates ("chat")."""
    also = ("--also-serve", f"chat={tiny_model('llama')}")
    with running_server(embedding_model("mean"), "--served-model-name", "embeds", *also) as found:
        yield Server(found.url, "chat", embedder="embeds")


SERVERS = {"scripted": scripted, "vectors": vectors, "tiny": tiny, "smollm2": smollm2, "pair": pair}
