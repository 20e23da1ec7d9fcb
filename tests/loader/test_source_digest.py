"""The digest of a model's files: of their content, which is read once."""

import hashlib
import os
import shutil

import pytest

from cpuserve.loader import source_digest
from cpuserve.loader.source_digest import SourceDigest

OLD = 1_600_000_000


@pytest.fixture
def model(tmp_path):
    """Two weight files, which changed long ago as far as a program can say that."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.safetensors").write_bytes(bytes([number]) * 3_000_000)
    return folder


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Count files as settled at once; the times of change of these ones are of this moment."""
    monkeypatch.setattr(source_digest, "SETTLED_NS", -(10**18))


def change(file, at):
    """Invert a byte, and set the old times again."""
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_copy_has_the_same_digest_and_any_other_byte_another(model, tmp_path):
    records = tmp_path / "records"
    digest = SourceDigest(model, records).compute()
    assert SourceDigest(model, records).known() == digest
    copy = shutil.copytree(model, tmp_path / "copy")
    assert SourceDigest(copy, records, threads=3).compute() == digest
    change(copy / "1.safetensors", 1_234_567)
    assert SourceDigest(copy, records).compute() != digest


def test_content_is_read_again_only_if_a_file_has_changed(model, tmp_path):
    digest = SourceDigest(model, tmp_path).compute()
    assert SourceDigest(model, tmp_path).known() == digest
    # Between two samples, and with the old time of modification: the time of change tells.
    change(model / "0.safetensors", 50_000)
    assert SourceDigest(model, tmp_path).known() is None
    assert SourceDigest(model, tmp_path).compute() != digest


def test_a_file_that_has_just_changed_is_not_recorded(model, tmp_path, monkeypatch):
    monkeypatch.setattr(source_digest, "SETTLED_NS", 10**18)
    SourceDigest(model, tmp_path).compute()
    assert SourceDigest(model, tmp_path).known() is None


def test_a_damaged_record_is_no_record(model, tmp_path):
    digest = SourceDigest(model, tmp_path).compute()
    (record,) = tmp_path.glob("*.source.json")
    for text in ("", "[]", '{"files": 1}', "\x00"):
        record.write_text(text)
        assert SourceDigest(model, tmp_path).known() is None
    assert SourceDigest(model, tmp_path).compute() == digest


def test_the_hubs_name_of_a_file_is_its_digest(tmp_path, monkeypatch):
    content = b"weights"
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    name = hashlib.sha256(content).hexdigest()
    (blobs / name).write_bytes(content)
    digests = []
    for revision in ("main", "other"):
        folder = tmp_path / revision
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(blobs / name)
        digests.append(SourceDigest(folder, tmp_path).known())
    assert digests[0] == digests[1] is not None


def test_a_change_while_the_content_is_read_is_an_error(model, tmp_path):
    digest = SourceDigest(model, tmp_path)
    change(model / "0.safetensors", 0)
    with pytest.raises(OSError, match="change while they are read"):
        digest.compute()
    with pytest.raises(OSError, match="change while they are read"):
        digest.check_unchanged()
    with pytest.raises(OSError, match="stopped"):
        SourceDigest(model, tmp_path).compute(lambda: True)
