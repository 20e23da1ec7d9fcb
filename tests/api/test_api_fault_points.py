"""Each call of the system fails once (cpuserve/base/fault_points.py), and the server stays sane."""

from dataclasses import dataclass

import pytest

from cpuserve.base.fault_points import POINTS
from tests.api.faulty import (
    EVERY,
    FAULTY,
    adapted,
    arm,
    batch,
    chat,
    claude_batch,
    continued,
    end,
    grammar,
    look,
    named_file,
    parts,
    restart,
    restored,
    seen,
    seen_elsewhere,
    seen_in_file,
    sent,
    stream,
    talk,
    text,
    texts,
    words,
)
from tests.api.sees import write_served_model
from tests.helpers.hostile_tokenizers import with_limited_tokenizer
from tests.helpers.patience import wait_until
from tests.helpers.sane import (
    GRAMMARS,
    PICTURES,
    TEMPLATES,
    TOKENIZERS,
    assert_server_sane,
    watched_server,
)
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.deep
# What a client may get while something fails: never an error 500 or 400, which blame a bug or it.
FINE = frozenset({200, 503, 507})

# --- the cases ------------------------------------------------------------------------------------

ENGINE_GONE = (
    r"the engine (ended with|was killed by|closed its connection)",
    "the engine serves again after",
    "the engine: the engine did not start",
    "the engine's process cannot be started",
    "the connection to the front end failed",
    "the memory of the engine cannot be mapped",
)
GRAMMARS_GONE = (
    "the process for grammars has ended and is started again",
    "the process for grammars ends, because the system refuses",
)
BATCHES = (r"batches failed \(",)
AUDIT = ("the audit file .* can",)
# A grammar that two attempts in a row did not compile fails its request, which may be sent again.
UNCOMPILED = (*GRAMMARS_GONE, "completions: 503 ")


@dataclass(frozen=True)
class Case:
    """request: reaches the point, perhaps at its second time. known: what the log may say.

    fine: the statuses that its clients may get. then: what ends a lasting effect.
    also: the point that has to fail before, and how.
    """

    point: str
    request: object
    known: tuple[str, ...] = ()
    fine: frozenset = FINE
    then: tuple = ()
    also: str = ""


CASES = (
    Case("children.start", restart, ENGINE_GONE),
    Case("children.connect", restart, ENGINE_GONE),
    Case("engine.configure", restart, ENGINE_GONE),
    Case("engine.receive", stream, ENGINE_GONE),
    Case("engine.send", stream, ENGINE_GONE),
    Case("engine.map", restart, ENGINE_GONE),
    Case("engine.step", stream, ENGINE_GONE),
    Case("front_end.receive", stream, ENGINE_GONE),
    Case("grammars.share", end(GRAMMARS), UNCOMPILED),
    Case("grammars.send", grammar, GRAMMARS_GONE),
    Case("grammars.receive", grammar, GRAMMARS_GONE),
    Case("grammar_process.map", end(GRAMMARS), UNCOMPILED),
    Case("grammar_process.receive", grammar, GRAMMARS_GONE),
    Case("grammar_process.send", grammar, GRAMMARS_GONE),
    Case("grammar_process.fork", grammar, GRAMMARS_GONE),
    Case("grammar_process.thread", grammar, GRAMMARS_GONE),
    Case("grammar_process.read", grammar, GRAMMARS_GONE),
    Case("grammar_fork.write", grammar, GRAMMARS_GONE),
    Case("templates.start", end(TEMPLATES)),
    Case("templates.connect", end(TEMPLATES)),
    Case("templates.send", chat),
    Case("templates.receive", chat),
    Case("template_process.accept", end(TEMPLATES)),
    Case("template_process.fork", end(TEMPLATES)),
    Case("template_fork.receive", chat),
    Case("template_fork.send", chat),
    Case("kv_block.open", text, (*ENGINE_GONE, "prefix cache"), then=(restart,)),
    Case("kv_block.read", restored),
    Case("kv_block.write", text, (*ENGINE_GONE, "prefix cache"), then=(restart,)),
    Case("response.list", talk),
    Case("response.read", continued),
    Case("response.write", talk, ("the tokens of a response cannot be kept",)),
    Case("record.write", batch, BATCHES),
    Case("record.sync", batch, BATCHES),
    Case("content.open", batch, BATCHES),
    Case("content.write", batch, BATCHES),
    Case("content.sync", batch, BATCHES),
    Case("content.cut", batch, BATCHES, also="content.write:2:ENOSPC"),
    Case("content.read", claude_batch),
    Case("content.read", named_file),
    Case("content.read", parts),
    Case("content.write", parts),
    Case("content.sync", parts),
    Case("content.open", parts),
    Case("model_file.rename", sent),
    Case("model_file.link", sent),
    Case("audit.write", text, AUDIT),
    Case("audit.sync", text, AUDIT),
    Case("audit.rename", texts, ("the audit file .* cannot be renamed",)),
    Case("client.accept", text, ("new connections are closed",)),
    Case("client.receive", text),
    Case("system.read", look("/v1/cpu")),
)
# Those of a model that reads pictures.
SEEN = (
    Case("pictures.start", end(PICTURES)),
    Case("pictures.connect", end(PICTURES)),
    Case("pictures.send", seen),
    Case("pictures.receive", seen),
    Case("pictures.read", seen),
    Case("picture_process.accept", end(PICTURES)),
    Case("picture_process.fork", end(PICTURES)),
    Case("picture_fork.receive", seen),
    Case("picture_fork.map", seen),
    Case("picture_fork.write", seen),
    Case("picture_fork.send", seen),
    Case("media_file.open", seen_in_file),
    Case("media.connect", seen_elsewhere, fine=FINE | {400}),
)
# Those of a model whose tokenizer is not plain.
LIMITED = (
    Case("tokenizers.start", end(TOKENIZERS)),
    Case("tokenizers.connect", end(TOKENIZERS)),
    Case("tokenizers.send", words),
    Case("tokenizers.receive", words),
    Case("tokenizer_process.accept", end(TOKENIZERS)),
    Case("tokenizer_process.fork", end(TOKENIZERS)),
    Case("tokenizer_fork.receive", words),
    Case("tokenizer_fork.send", words),
)
# Those of a server whose clients may load adapters.
ADAPTED = (Case("adapter.read", adapted),)


def runs(cases):
    """The parameters of a test: each case with each way in which its point can fail."""
    made = [(case, action) for case in cases for action in POINTS[case.point].actions]
    ids = [f"{case.point}-{action}" for case, action in made]
    return pytest.mark.parametrize(("case", "action"), made, ids=ids)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "plans").mkdir()
    options = [
        *("--served-model-name", "m", "--max-model-len", 512, "--kv-cache-memory", "256KiB"),
        *("--prefix-cache-dir", folder / "prefixes", "--files-dir", folder / "files"),
        *("--models-dir", folder / "models"),
        *("--audit", folder / "audit", "--audit-bytes", "64KiB"),
        *("--omp-threads-bind", "nobind"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(folder / "plans")}
    with watched_server(folder, tiny_model("llama"), *options, **faults) as made:
        for request in EVERY * 2:
            for status, body in request(made):
                assert status == 200, body
        made.settle()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "plans").mkdir()
    options = [
        *("--served-model-name", "m", "--max-model-len", 256, "--kv-cache-memory", "1MiB"),
        *("--allowed-local-media-path", folder, "--allowed-media-domains", "*"),
        *("--omp-threads-bind", "nobind"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(folder / "plans")}
    model = write_served_model(folder / "model").path
    with watched_server(folder, model, *options, **faults) as made:
        for request in (text, chat, seen, seen_in_file) * 2:
            for status, body in request(made):
                assert status == 200, body
        made.settle()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapting")
    (folder / "plans").mkdir()
    options = [
        *("--served-model-name", "m", "--max-model-len", 256, "--kv-cache-memory", "256KiB"),
        *("--allow-runtime-lora-updating", "--max-loras", 1, "--omp-threads-bind", "nobind"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(folder / "plans")}
    with watched_server(folder, tiny_model("llama"), *options, **faults) as made:
        for request in (text, adapted) * 2:
            for status, body in request(made):
                assert status == 200, body
        made.settle()
        yield made
        made.stop()


def check(server, case, action):
    """The server is sane after the point has failed once in this way."""
    for plan in (case.also, f"{case.point}:1:{action}"):
        fired = arm(server.folder / "plans", plan)

    def has_fired():
        wait_until(lambda: server.ask("/health")[0] == 200, lambda: server.log()[-3000:])
        for status, body in case.request(server):
            assert status in case.fine, body
        return fired.exists()

    server.new_log()
    wait_until(has_fired, f"{case.point} was not reached")
    for after in case.then:
        after(server)
    assert_server_sane(server, *case.known)


@pytest.fixture(scope="module")
def limiting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limiting")
    (folder / "plans").mkdir()
    options = [
        *("--served-model-name", "m", "--max-model-len", 256, "--kv-cache-memory", "256KiB"),
        *("--omp-threads-bind", "nobind"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(folder / "plans")}
    model = with_limited_tokenizer(tiny_model("llama"), folder / "model")
    with watched_server(folder, model, *options, **faults) as made:
        for request in (words, chat, text) * 2:
            for status, body in request(made):
                assert status == 200, body
        made.settle()
        yield made
        made.stop()


@runs(LIMITED)
def test_a_server_with_a_limited_tokenizer_is_sane_after(case, action, limiting):
    check(limiting, case, action)


@runs(CASES)
def test_the_server_is_sane_after(case, action, server):
    check(server, case, action)


@runs(SEEN)
def test_a_server_with_pictures_is_sane_after(case, action, seeing):
    check(seeing, case, action)


@runs(ADAPTED)
def test_a_server_with_adapters_is_sane_after(case, action, adapting):
    check(adapting, case, action)
