"""Repositories with only pickles: the bot's pull request is used, but never another author's."""

import contextlib
import dataclasses
import logging
import threading
from types import SimpleNamespace

import huggingface_hub
import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader import hub
from cpuserve.loader.hub import BOT

PICKLES = ["config.json", "tokenizer.json", "pytorch_model.bin", "convert.py"]
CONVERTED = [*PICKLES, "model.safetensors"]


def request(num, author=BOT, status="open", is_pull_request=True):
    return SimpleNamespace(num=num, author=author, status=status, is_pull_request=is_pull_request)


@dataclasses.dataclass
class FakeHub:
    """The three functions of huggingface_hub that are called, over files by revision."""

    files: dict
    requests: list
    cache: object
    fetched: list = dataclasses.field(default_factory=list)
    listed: int = 0

    def model_info(self, repo, *, revision=None, timeout):
        if self.files is None:
            raise ConnectionError
        names = [*self.files[revision], "onnx/model.safetensors"]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n) for n in names])

    def get_repo_discussions(self, repo, *, author, discussion_type, discussion_status):
        assert (author, discussion_type, discussion_status) == (BOT, "pull_request", "open")
        self.listed += 1
        if isinstance(self.requests, Exception):
            raise self.requests
        yield from self.requests

    def snapshot_download(self, repo, *, revision, allow_patterns, tqdm_class, max_workers=8):
        self.fetched.append((revision, sorted(allow_patterns)))
        home = self.cache / f"models--{repo.replace('/', '--')}"
        reference = home / "refs" / (revision or "main")
        reference.parent.mkdir(parents=True, exist_ok=True)
        commit = f"commit-of-{(revision or 'main').replace('/', '-')}"
        reference.write_text(commit)
        folder = home / "snapshots" / commit
        folder.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            (folder / name).write_text("{}")
        return str(folder)


@pytest.fixture(autouse=True)
def logged(monkeypatch, caplog):
    """Make log records reach caplog even if other tests have configured logging."""
    monkeypatch.setattr(logging.getLogger("cpuserve"), "propagate", True)
    caplog.set_level(logging.INFO, "cpuserve")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """make(files by revision, requests) installs a FakeHub."""

    def make(files, requests):
        made = FakeHub(files, requests, tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
        api = SimpleNamespace(
            model_info=made.model_info, get_repo_discussions=made.get_repo_discussions
        )
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        return made

    return make


def test_the_bots_conversion_is_fetched_and_said_in_one_line(fake, caplog):
    made = fake({None: PICKLES, "refs/pr/3": CONVERTED}, [request(3)])
    path = hub.resolve_model("org/model")
    assert path.name == "commit-of-refs-pr-3"
    assert made.fetched == [
        ("refs/pr/3", ["config.json"]),  # whether the model can be served
        ("refs/pr/3", ["config.json", "model.safetensors", "tokenizer.json"]),
    ]
    (record,) = caplog.records
    assert "org/model has only pickles" in record.getMessage()
    assert "refs/pr/3" in record.getMessage()


def test_the_first_request_that_has_weights_is_taken(fake):
    module = [*PICKLES, "2_Dense/model.safetensors"]  # weights, but not of the model
    files = {None: PICKLES, "refs/pr/9": module, "refs/pr/4": CONVERTED}
    made = fake(files, [request(9), request(4)])
    hub.resolve_model("org/model")
    assert {revision for revision, _ in made.fetched} == {"refs/pr/4"}


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [request(3, author="stranger")],
        [request(3, author=BOT.lower())],
        [request(3, status="closed")],
        [request(3, is_pull_request=False)],
        OSError("pull requests are turned off"),
        TimeoutError(),
    ],
    ids=["none", "stranger", "look-alike", "closed", "discussion", "turned off", "silent"],
)
def test_without_a_conversion_by_the_bot_pickles_are_refused(fake, caplog, requests):
    made = fake({None: PICKLES, "refs/pr/3": CONVERTED}, requests)
    with pytest.raises(ModelError, match=r"org/model has no safetensors .*only pickles"):
        hub.resolve_model("org/model")
    assert made.fetched == []
    assert made.listed == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "revision", "files"),
    [
        ("org/model", None, {None: CONVERTED}),
        ("org/model:m-Q4_0.gguf", None, {None: [*PICKLES, "m-Q4_0.gguf"]}),
        ("org/model", "v1", {"v1": PICKLES}),
        ("org/model", None, {None: ["config.json"]}),
        ("org/model", None, {None: [*PICKLES, "m-Q4_0.gguf"]}),
    ],
    ids=["safetensors", "gguf named", "revision named", "no weights", "gguf to name"],
)
def test_nobody_looks_for_a_conversion_of_what_was_not_asked_for(fake, name, revision, files):
    made = fake(files, [request(3)])
    with contextlib.suppress(ModelError):
        hub.resolve_model(name, revision=revision)
    assert made.listed == 0


def test_a_conversion_is_found_again_without_a_connection(fake, caplog):
    made = fake({None: PICKLES, "refs/pr/3": CONVERTED}, [request(3)])
    path = hub.resolve_model("org/model")
    made.files = None
    # pickles that another program keeps in the same cache
    main = made.cache / "models--org--model" / "snapshots" / "main"
    main.mkdir()
    (main / "pytorch_model.bin").touch()
    caplog.clear()
    assert hub.resolve_model("org/model") == path
    assert "refs/pr/3, from the local cache" in caplog.text
    (main / "model.safetensors").touch()
    (main / "config.json").touch()
    assert hub.resolve_model("org/model") == main


def test_a_list_of_requests_that_never_comes_is_given_up(fake, monkeypatch):
    never = threading.Event()
    fake({None: PICKLES}, [])
    only_pickles = hub._only_pickles

    def hasty(names):  # from here on, for the first query is to be answered on a busy machine, too
        monkeypatch.setattr(hub, "PROBE_DEADLINE_S", 0.2)
        return only_pickles(names)

    monkeypatch.setattr(hub, "_only_pickles", hasty)
    monkeypatch.setattr(hub, "find_conversion", lambda *_: never.wait())
    with pytest.raises(ModelError, match="only pickles"):
        hub.resolve_model("org/model")
    never.set()
