"""The limits of a caller are exact to one request, because use is reserved first."""

import random
from contextlib import suppress

import pytest

from cpuserve.serving.callers.allowance import Allowance, LimitReached
from cpuserve.serving.callers.caller import Caller, CallerLimits, CallerUse, MinuteWindow


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def allowance(use, **limits):
    return Allowance(Caller("alice", "caller-alice", limits=CallerLimits(**limits), use=use))


def began(use, **limits):
    """Begin a request, and return its Allowance."""
    made = allowance(use, **limits)
    made.begin()
    return made


def refusal(use, **limits):
    with pytest.raises(LimitReached) as caught:
        began(use, **limits)
    return caught.value


def test_no_minute_has_more_than_the_limit_and_each_refusal_says_when_to_return():
    chance, clock = random.Random(1), Clock()
    use, accepted, refused = CallerUse(clock), [], 0
    for _ in range(5000):
        clock.now += chance.expovariate(1.0)
        made = allowance(use, requests=20)
        with suppress(LimitReached):
            made.begin()
            made.end()
            accepted.append(clock.now)
            continue
        refused += 1
        error = refusal(use, requests=20)
        assert (error.status, error.limit) == (429, "requests")
        # At the time in the error, the oldest request is a minute old, and not much older.
        there = clock.now + error.retry_after_s
        assert accepted[-20] + 60 <= there <= accepted[-20] + 62
    assert refused > 1000
    for first, later in zip(accepted, accepted[20:], strict=False):
        assert later - first >= 60


def test_a_request_comes_back_exactly_when_its_refusal_says():
    clock = Clock(1000.25)
    use = CallerUse(clock)
    for _ in range(3):
        began(use, requests=3).end()
        clock.now += 5
    error = refusal(use, requests=3)
    assert "alice" in error.message
    assert "3 requests a minute" in error.message
    assert f"in {error.retry_after_s:.0f} s" in error.message
    clock.now += error.retry_after_s
    began(use, requests=3).end()
    refusal(use, requests=3)


def test_requests_at_the_same_time_are_exact_and_refusals_are_not_counted():
    use = CallerUse(Clock())
    running = [began(use, parallel=4, requests=100) for _ in range(4)]
    for _ in range(50):
        assert refusal(use, parallel=4, requests=100).limit == "parallel"
    assert use.requests.total() == 4
    running[0].end()
    running[0].end()  # a second call gives nothing back
    assert use.running == 3
    began(use, parallel=4)
    assert "4 requests at the same time" in refusal(use, parallel=4).message


def test_tokens_are_reserved_and_only_the_last_request_exceeds_the_limit():
    use = CallerUse(Clock())
    held = []
    for _ in range(3):
        held.append(began(use, tokens=100))
        held[-1].reserve(40)
    assert use.reserved == 120  # the third began while tokens were left
    fourth = began(use, tokens=100)
    with pytest.raises(LimitReached) as caught:
        fourth.reserve(1)
    assert caught.value.limit == "tokens"
    assert "100 tokens a minute" in caught.value.message
    assert "have reserved 120" in caught.value.message
    for each in held:
        each.spend(40)
    assert (use.reserved, use.tokens.total()) == (0, 120)
    for each in (*held, fourth):
        each.end()
    assert (use.running, use.reserved, use.tokens.total()) == (0, 0, 120)


def test_a_request_that_uses_less_gives_back_what_it_reserved():
    clock = Clock()
    use = CallerUse(clock)
    first = began(use, tokens=100)
    first.reserve(90)
    first.spend(10)  # a prompt of which the rest was cached
    first.spend(5)
    assert first.minute_limits()["tokens"].left == 10
    first.end()
    assert first.minute_limits()["tokens"].left == 85
    clock.now += 61
    assert first.minute_limits()["tokens"].left == 100


def test_later_parts_of_a_request_are_never_refused():
    use = CallerUse(Clock())
    first = began(use, tokens=10)
    first.reserve(10)
    first.spend(30)
    first.reserve(50)
    first.check_tokens()
    assert use.reserved == 50
    first.end()
    assert use.reserved == 0
    with pytest.raises(LimitReached):
        began(use, tokens=10).check_tokens()


def test_random_requests_never_exceed_the_tokens_by_more_than_one_request():
    chance, clock = random.Random(2), Clock()
    use, running, spent, largest = CallerUse(clock), [], [], 0
    for _ in range(4000):
        clock.now += chance.random() * 2
        if running and chance.random() < 0.5:
            each, most = running.pop(chance.randrange(len(running)))
            used = chance.randrange(most + 1)
            each.spend(used)
            each.end()
            spent.append((clock.now, used))
        else:
            made, most = began(use, tokens=500), chance.randrange(1, 200)
            try:
                made.reserve(most)
            except LimitReached:
                made.end()
                continue
            running.append((made, most))
            largest = max(largest, most)
        assert 0 <= use.reserved < 500 + 200
    for now, _ in spent:
        assert sum(used for when, used in spent if now - 60 < when <= now) <= 500 + largest
    for each, _ in running:
        each.end()
    assert (use.running, use.reserved) == (0, 0)


def test_a_changed_limit_is_compared_with_what_was_used_before():
    use = CallerUse(Clock())
    for _ in range(5):
        began(use, requests=10).end()
    assert refusal(use, requests=5).limit == "requests"
    assert began(use, requests=6).minute_limits()["requests"].left == 0


def test_a_window_keeps_seconds_and_not_amounts():
    clock = Clock()
    window = MinuteWindow(clock)
    for _ in range(100_000):
        clock.now += 0.01
        window.add(1)
    assert len(window._seconds) <= 62
    assert 6000 <= window.total() <= 6100
    clock.now += 61
    assert (window.total(), window.empty_in()) == (0, 0.0)


def test_the_largest_limits_are_counted():
    most = 2**31 - 1
    use = CallerUse(Clock())
    made = began(use, requests=most, tokens=most, parallel=most)
    made.reserve(2 * most)
    made.spend(most)
    left = {kind: found.left for kind, found in made.minute_limits().items()}
    assert left == {"requests": most - 1, "tokens": 0}
