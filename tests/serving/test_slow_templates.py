"""A template that takes long to render ends the learning at a start, with one line."""

from types import SimpleNamespace

import pytest

from cpuserve.serving.tools.learn import learn_format
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.rendering import client
from cpuserve.tokenizer.rendering.client import RENDERER, limited_learning_time
from tests.helpers.bare_tokens import bare_tokens

WORDS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SLOW = WORDS + "slow"
SLOW_WITH_TOOLS = WORDS + "{% if tools %}slow{% endif %}"


@pytest.fixture
def renders(monkeypatch):
    """Let learning end after 0.2 s, and count the renders; one that writes "slow" takes 0.1 s.

    The seconds are those of a clock of the test, so a fast or a busy machine changes nothing.
    """
    clock, jobs, do = SimpleNamespace(now=0.0), [], RENDERER._do
    monkeypatch.setattr(client, "LEARN_S", 0.2)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def counted(source, data):
        if data is not None:
            jobs.append(source)
        text = do(source, data)
        clock.now += 0.1 * (b"slow" in text)
        return text

    monkeypatch.setattr(RENDERER, "_do", counted)
    return jobs


def test_a_start_ends_the_learning_of_a_slow_template_with_one_line(renders):
    template = ChatTemplate(SLOW, bare_tokens())
    fault = template.fault()
    assert "chat requests will be refused (400)" in fault
    assert "its first renders take more than 0.2 s together" in fault
    assert "\n" not in fault
    assert len(renders) < 20


def test_later_requests_do_not_learn_a_slow_template_again(renders):
    template = ChatTemplate(SLOW, bare_tokens())
    template.fault()
    count = len(renders)
    assert "first renders" in template.fault()
    assert len(renders) == count


def test_a_format_is_not_learned_from_a_slow_template(renders, caplog):
    template = ChatTemplate(SLOW_WITH_TOOLS, bare_tokens())
    with limited_learning_time():
        fault = template.fault()
        learned = learn_format(template)
    assert fault is not None or (learned.calls is None and "first renders" in learned.why)
    assert len(renders) < 40


def test_blocks_in_a_block_share_its_time(renders):
    quick = ChatTemplate(WORDS, bare_tokens())
    with limited_learning_time():
        client._LEFT.get().seconds = 0.0
        assert "first renders" in quick.fault()
    assert renders == []
    assert ChatTemplate(WORDS, bare_tokens()).fault() is None
