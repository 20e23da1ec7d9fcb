"""Thoughts that clients send back as a text."""

import base64
import hashlib
import logging
import os
import stat
import zlib

import pytest

from cpuserve.api.request import sealed
from cpuserve.api.request.sealed import Seal, packed_texts, thought_of

SEAL = Seal()


def opened(seal, text):
    found = seal.packed(text)
    return None if found is None else thought_of(found)


@pytest.mark.parametrize("thought", ["", "Hm.", "é\n" * 1000, "\ud800"])
def test_a_thought_comes_back(thought):
    assert opened(SEAL, SEAL.sealed(thought)) == thought.encode("utf-8", "replace").decode()


def unkeyed(thought):
    """The text that an earlier version wrote: anyone can compute its checksum."""
    packed = zlib.compress(thought.encode())
    return (
        "cpuserve1."
        + base64.urlsafe_b64encode(hashlib.sha256(packed).digest()[:8] + packed).decode()
    )


HM = SEAL.sealed("Hm.")


@pytest.mark.parametrize(
    "text",
    ["", "gAAAAB", "cpuserve2.", "cpuserve2.é", "cpuserve2.AAAA", "cpuserve2.!!", HM[:-2],
     HM[:-4], HM[:20] + ("A" if HM[20] != "A" else "B") + HM[21:], unkeyed("Hm."),
     "cpuserve2." + unkeyed("Hm.")[10:], Seal().sealed("Hm.")],
    # The texts differ between processes, and pytest's workers compare the names of tests.
    ids=["empty", "fernet", "no_data", "no_ascii", "short", "no_base64", "cut_2", "cut_4",
         "other_checksum", "version_1", "no_key", "other_key"],
)  # fmt: skip
def test_a_text_that_this_server_did_not_write_is_none(text):
    assert SEAL.packed(text) is None


def test_every_occurrence_counts_and_nothing_is_expanded_to_count_it(monkeypatch):
    monkeypatch.setattr(sealed.zlib, "decompress", lambda data: pytest.fail("expanded"))
    texts = [SEAL.sealed("é" * 50), Seal().sealed("x" * 1000), SEAL.sealed("x")]
    packed, size = packed_texts(SEAL, [*texts, texts[0]])
    assert set(packed) == {texts[0], texts[2]}
    assert size == 201


def test_the_key_is_kept_and_only_its_owner_can_read_it(tmp_path):
    text = Seal.kept_in(tmp_path / "new").sealed("Hm.")
    assert opened(Seal.kept_in(tmp_path / "new"), text) == "Hm."
    assert opened(Seal.kept_in(tmp_path / "other"), text) is None
    (file,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert base64.b64encode(file.read_bytes()).decode() not in repr(Seal.kept_in(tmp_path / "new"))


def test_without_a_place_for_the_key_the_server_has_one_until_it_ends(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("cpuserve"), "propagate", True)
    (tmp_path / "file").write_text("")
    with caplog.at_level("INFO", "cpuserve"):
        seal = Seal.kept_in(tmp_path / "file" / "folder")
    assert opened(seal, seal.sealed("Hm.")) == "Hm."
    assert "cannot be kept" in caplog.text
    assert os.strerror(20) in caplog.text
