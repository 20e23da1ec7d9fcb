"""Thoughts that clients send back as a text."""

import pytest

from cpuserve.serving.sealed import sealed, unsealed


@pytest.mark.parametrize("thought", ["", "Hm.", "é\n" * 1000, "\ud800"])
def test_a_thought_comes_back(thought):
    assert unsealed(sealed(thought)) == thought.encode("utf-8", "replace").decode()


@pytest.mark.parametrize(
    "text",
    [None, 1, [], "", "gAAAAB", "cpuserve1.", "cpuserve1.é", "cpuserve1.AAAA", "cpuserve1.!!",
     sealed("Hm.")[:-2], sealed("Hm.")[:20] + "A" + sealed("Hm.")[21:]],
)  # fmt: skip
def test_the_text_of_another_server_is_none(text):
    assert unsealed(text) is None
