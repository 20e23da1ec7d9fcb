"""Files of models and adapters whose reads fail once: one error, and nothing is left behind."""

import gc

import psutil
import pytest

from cpuserve.base import fault_points
from cpuserve.base.errors import ModelError
from cpuserve.loader import source_digest
from cpuserve.loader.mapped import copy_file
from cpuserve.loader.source_digest import SourceDigest
from tests.helpers.once import Once
from tests.helpers.tiny import tiny_model


@pytest.mark.parametrize("action", ["EIO", "EMFILE"])
def test_an_adapter_that_cannot_be_read_is_one_error(action, monkeypatch, tmp_path):
    file = tmp_path / "adapter"
    file.write_bytes(b"12")
    monkeypatch.setattr(fault_points, "_hook", Once("adapter.read", action))
    gc.collect()  # else files of earlier tests may be closed meanwhile
    before = psutil.Process().num_fds()
    with pytest.raises(ModelError, match="cannot be read"):
        list(copy_file(file, "adapter", 100))
    assert psutil.Process().num_fds() == before
    assert list(copy_file(file, "adapter", 100)) == [None]


def test_a_digest_that_cannot_be_recorded_is_computed_again(monkeypatch, tmp_path):
    monkeypatch.setattr(source_digest, "SETTLED_NS", 0)
    fails = Once("source.write", "ENOSPC")
    monkeypatch.setattr(fault_points, "_hook", fails)
    model = tiny_model("llama")
    first = SourceDigest(model, tmp_path).compute()
    assert fails.fired
    assert not list(tmp_path.iterdir())
    assert SourceDigest(model, tmp_path).known() is None
    assert SourceDigest(model, tmp_path).compute() == first
    assert SourceDigest(model, tmp_path).known() == first
