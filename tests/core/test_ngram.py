"""The index of n-grams: what it guesses, in Python and in C++, and how its memory is limited."""

import itertools
import random

import pytest

from cpuserve import _C
from cpuserve.config.speculation import read_speculation
from cpuserve.core.media import Placeholders
from cpuserve.core.request import Request
from cpuserve.core.speculation.ended_responses import MOST_SALTS, RECENT, EndedResponses
from cpuserve.core.speculation.ngram import GAIN, LONGEST, first_chances, in_python
from cpuserve.core.speculation.ngram_drafts import (
    LATE,
    MANY_MISSES,
    RESTS,
    SLICE,
    NgramDrafts,
    indexed_tokens,
    price_of,
)
from cpuserve.sampling.params import SamplingParams
from tests.helpers.media_items import picture_item


def in_cpp(least, most):
    shared = _C.NgramChances()
    return lambda tokens: _C.NgramIndex(least, most, shared, tokens)


@pytest.fixture(params=[in_python, in_cpp])
def make(request):
    return lambda least, most: request.param(least, most)(9)


def guess_by_scan(ids, count, least, most):
    """What follows the latest place of the longest n-gram with which `ids` ends."""
    for size in range(most, least - 1, -1):
        for at in range(len(ids) - 1, size - 1, -1):
            if ids[at - size : at] == ids[-size:]:
                found = list(ids)
                for i in range(count):
                    found.append(found[at + i])
                return found[len(ids) :]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 4), (3, 3)])
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_guess_is_what_followed_the_longest_match_last(make, least, most, at_once):
    choose = random.Random(3)
    more = ids = [choose.randrange(4) for _ in range(9)]
    index = make(least, most)
    checked, right = 0, False
    for _ in range(400):
        index.advance(more)
        found = index.guess(6)
        # A guess that was right is kept: its match is longer than any n-gram.
        if not right and (want := guess_by_scan(ids, 6, least, most)):
            assert found == want
            checked += 1
        more = [choose.randrange(4) for _ in range(at_once)]
        right = found[at_once - 1 : at_once] == more[-1:]
        ids = ids + more
    assert checked > 200


def test_a_guess_that_was_right_is_continued_at_its_place(make):
    # "1 2 3" stands twice; the last place is followed by 9, but the answer copies the first one.
    index = make(2, 3)
    index.advance([7, 8, 1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 7, 8])
    assert index.guess(4) == [1, 2, 3, 4]
    index.advance([1, 2, 3])
    assert index.guess(2) == [4, 5]
    index.advance([9])  # it leaves that place
    assert index.guess(2) == [7, 8]


def test_a_copy_with_one_token_changed_goes_on_behind_it(make):
    index = make(2, 3)
    index.advance([1, 2, 3, 4, 5, 6, 7, 1, 2])
    index.advance([9])  # instead of 3
    assert index.guess(3) == [4, 5, 6]
    assert index.chances(1) == first_chances()[:1]
    index.advance([4])
    assert index.guess(3) == [5, 6, 7]
    assert index.chances(1) == first_chances()[1:2]
    index.advance([9, 1, 2])  # an n-gram is a better match
    assert index.guess(3) == [9, 4, 9]


def test_a_text_that_repeats_its_end_is_continued_beyond_it(make):
    index = make(2, 4)
    index.advance([5, 1, 2, 3, 1, 2, 3])
    assert index.guess(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert index.guess(0) == []


@pytest.mark.parametrize("maker", [in_python, in_cpp])
def test_chances_follow_the_guesses_of_their_length_whether_verified_or_not(maker):
    make_index = maker(2, 2)
    index = make_index(6)
    index.advance([1, 2, 3, 9, 1, 2])
    (before,) = index.chances(1)
    assert before == first_chances()[2]
    index.advance([4, 1, 2])
    chances = index.chances(99)
    assert chances[0] == pytest.approx(before * (1 - GAIN))
    assert chances[1] == first_chances()[3]
    assert chances[98] == first_chances()[LONGEST]
    later = make_index(2)
    later.advance([1, 2, 3, 1, 2])
    assert first_chances()[2] > later.chances(1)[0] > chances[0]


def test_the_index_in_cpp_equals_the_one_in_python_on_long_texts():
    choose = random.Random(11)
    for least, most, letters in ((2, 4, 6), (1, 3, 300), (4, 9, 2), (1, 32, 3)):
        indexes = [make(least, most)(0) for make in (in_python, in_cpp)]
        for _ in range(300):
            more = [choose.randrange(letters) for _ in range(choose.choice([0, 1, 1, 2, 40]))]
            adds = choose.random() < 0.1
            for index in indexes:
                index.add(more) if adds else index.advance(more)
            found = [(index.guess(7), index.chances(7)) for index in indexes]
            assert found[0] == found[1]


def test_tokens_that_are_added_without_guesses_are_found_later():
    for make in (in_python, in_cpp):
        index = make(2, 3)(4)
        index.add(range(100, 2000))
        assert index.guess(3) == []
        index.advance([500, 501])
        assert index.guess(3) == [502, 503, 504]
        index.add([7])
        assert index.guess(3) == []


def test_an_index_takes_at_most_the_planned_bytes_for_a_token():
    for least, most in ((2, 4), (1, 1), (3, 12)):
        tokens = 100_000
        index = in_cpp(least, most)(tokens // 3)
        index.add([(i * 7919 + i // 1000) % 50_000 for i in range(tokens)])
        sizes = {"prompt_lookup_min": least, "prompt_lookup_max": most}
        asked = read_speculation({"method": "ngram", **sizes})
        assert index.bytes <= asked.index_bytes(1, tokens)
        assert index.bytes * 5 > asked.index_bytes(1, tokens)


def test_an_index_refuses_sizes_that_it_cannot_have():
    for least, most, tokens in ((0, 2, 1), (3, 2, 1), (1, 33, 1), (2, 4, -1), (2, 4, 1 << 27)):
        with pytest.raises(ValueError, match=r"an index has"):
            _C.NgramIndex(least, most, _C.NgramChances(), tokens)


# --- indexes of requests -----------------------------------------------------------------------


IDS = itertools.count()


def request_of(length, max_tokens=100, salt=None):
    ids = [i % 251 + 300 * (i // 251 % 7) for i in range(length)]
    return Request(next(IDS), ids, SamplingParams(), max_tokens, 0, salt=salt)


def drafts_of(most_tokens=10**6):
    return NgramDrafts(in_cpp(2, 4), most_tokens)


def propose(source, *requests, count=3):
    source.begin()
    return [source.propose(request, count)[0] for request in requests]


def test_a_long_text_is_indexed_in_slices_of_a_step():
    source = drafts_of()
    first, second, short = request_of(2 * SLICE + 200), request_of(SLICE), request_of(LATE)
    fed = []
    for _ in range(4):
        found = propose(source, first, second, short)
        indexed = [source.texts[r.id].tokens for r in (first, second)]
        fed.append((*indexed, [bool(f) for f in found]))
    assert fed[0] == (SLICE, 0, [False, False, False])
    assert fed[1] == (2 * SLICE, 0, [False, False, False])
    assert fed[2] == (2 * SLICE + 200, SLICE - 200, [True, False, False])
    assert fed[3] == (2 * SLICE + 200, SLICE, [True, True, False])
    first.token_ids += first.token_ids[10:13]
    assert propose(source, first, count=2) == [first.token_ids[13:15]]


@pytest.mark.parametrize("length", [3 * SLICE, 131_072, 1_000_000])
def test_a_step_indexes_a_bounded_part_of_all_long_texts(length):
    source = NgramDrafts(in_cpp(2, 4), 1 << 24)
    requests = [request_of(length) for _ in range(3 if length < 10**6 else 1)]
    parts = []
    while not all(r.id in source.texts and source.texts[r.id].tokens == length for r in requests):
        before = [source.texts[r.id].tokens if r.id in source.texts else 0 for r in requests]
        propose(source, *requests)
        parts.append([source.texts[r.id].tokens - b for r, b in zip(requests, before, strict=True)])
        assert sum(parts[-1]) <= SLICE, "a step takes too long"
        price = price_of(before[0], length)
        assert parts[-1][0] * price <= SLICE or parts[-1][0] == 0
    whole = len(requests) * length / SLICE
    assert whole <= len(parts) <= 1.25 * whole + 3
    if length == 131_072:
        assert parts[0][0] == SLICE // 41
        assert sorted(map(max, parts))[len(parts) // 4] == SLICE


def test_a_text_reserves_memory_as_it_grows_and_not_for_its_longest_response():
    source = drafts_of(most_tokens=1000)
    requests = [request_of(300, max_tokens=10**6) for _ in range(4)]
    for number, request in enumerate(requests):
        request.id = number
    propose(source, *requests)
    assert [r.id in source.texts for r in requests] == [True, True, True, False]
    assert source.reserved == 900
    requests[0].token_ids += range(50)
    propose(source, requests[0])
    assert source.reserved == source.texts[requests[0].id].reserved + 600 == 975
    requests[1].token_ids += range(50)
    assert propose(source, requests[1]) == [[]]
    assert requests[1].id not in source.texts
    assert source.reserved == 675
    propose(source, requests[1])  # it would only outgrow its memory again
    assert requests[1].id not in source.texts
    propose(source, requests[3])
    assert requests[3].id in source.texts
    for request in requests:
        source.forget(request)
    assert source.reserved == 0
    propose(source, requests[1])
    assert requests[1].id in source.texts


def test_a_text_without_drafts_that_pay_gives_its_memory_to_another_one():
    source = drafts_of(most_tokens=700)
    first, second, third = requests = [request_of(300) for _ in range(3)]
    for number, request in enumerate(requests):
        request.id = number
    propose(source, first, second)
    for _ in range(MANY_MISSES):
        source.look_again(first, has_draft=False)
        source.look_again(second, has_draft=True)
    propose(source, third)
    assert [r.id in source.texts for r in requests] == [False, True, True]
    propose(source, first)
    assert first.id not in source.texts


def test_texts_without_drafts_that_pay_are_looked_at_more_rarely_and_in_the_same_steps():
    source, requests = drafts_of(), [request_of(300), request_of(310)]
    asked = {0: [], 1: []}
    for step in range(1, 200):
        source.begin()
        for number, request in enumerate(requests[: 1 + (step > 40)]):
            request.id = number
            request.token_ids.append(10_000 + step)
            if (
                request.id not in source.texts
                or len(request.token_ids) >= source.texts[request.id].due
            ):
                asked[number].append(step)
                source.propose(request, 3)
                source.look_again(request, has_draft=False)
    assert asked[0][:9] == list(range(1, 10))
    assert len(asked[0]) < 40
    assert asked[0][-5:] == asked[1][-5:] == [160, 168, 176, 184, 192]
    assert asked[1][:9] == list(range(41, 50))


def test_a_draft_that_pays_lets_a_text_be_looked_at_twice_as_often():
    source, request = drafts_of(), request_of(300)
    propose(source, request)
    for _ in range(100):
        source.look_again(request, has_draft=False)
    waits = []
    for _ in range(3):
        source.begin()
        waits.append(source.look_again(request, has_draft=True))
    assert waits[1:] == [0, 0]
    assert waits[0] in (0, 1)


def test_an_index_is_dropped_while_no_draft_pays_and_built_again():
    source, request = drafts_of(), request_of(800)
    propose(source, request)
    for _ in range(RESTS):
        source.rest(request)
    assert request.id in source.texts
    propose(source, request)
    for _ in range(RESTS + 1):
        source.rest(request)
    assert request.id not in source.texts
    assert source.reserved == 0
    request.token_ids += request.token_ids[10:13]
    assert propose(source, request) == [request.token_ids[13:16]]


def test_placeholders_of_pictures_are_hidden_from_the_index():
    request = Request(0, [9, 9, 1, 2, 3, 9, 9, 4, 1, 2], SamplingParams(), 50, 0)
    picture = picture_item(bytes(32), [(0, 2), (5, 2)], [])
    request.chain.placeholders = Placeholders([picture])
    assert propose(drafts_of(), request, count=2) == [[3, 4]]
    assert indexed_tokens(request, 1, 7) == [1, 2, 3]


# --- responses that have ended -----------------------------------------------------------------


def end(source, response, salt=None):
    """End a request with this response, after a prompt of 20 tokens."""
    request = request_of(20, salt=salt)
    request.token_ids += response
    source.end(request)


def begin_like(source, response, salt=None, prompt=20):
    """Return the drafts for a new request that begins its response with `response`."""
    request = request_of(prompt, salt=salt)
    request.token_ids += response
    return propose(source, request), request


def test_a_response_is_guessed_from_an_earlier_one_of_its_salt():
    source = drafts_of()
    end(source, range(5000, 5100), salt="a")
    assert begin_like(source, [5040, 5041], salt="a")[0] == [[5042, 5043, 5044]]
    assert begin_like(source, [5040, 5041], salt="b")[0] == [[]]
    assert begin_like(source, [5040, 5041])[0] == [[]]
    source.end(request_of(40, salt="b"))  # a prompt without a response
    assert begin_like(source, [12, 13], salt="b", prompt=2)[0] == [[]]


def test_the_text_of_the_request_goes_before_earlier_responses():
    source = drafts_of()
    end(source, [5000, 5001, 5002])
    found, _ = begin_like(source, [5000, 5001, 7, 8, 9, 5000, 5001])
    assert found == [[7, 8, 9]]


def test_the_newest_tokens_of_the_salts_that_were_used_last_are_kept():
    ended = EndedResponses()
    for number in range(3):
        request = request_of(20, salt="long")
        request.token_ids += [number] * (RECENT // 2 + 1)
        ended.add(request)
    kept = list(ended.of("long"))
    assert kept == [1] * (RECENT // 2 - 1) + [2] * (RECENT // 2 + 1)
    request = request_of(20, salt="longer")
    request.token_ids += range(3 * RECENT)
    ended.add(request)
    assert list(ended.of("longer")) == list(range(2 * RECENT, 3 * RECENT))
    for number in range(MOST_SALTS - 2):
        request = request_of(1, salt=str(number))
        request.token_ids.append(5)
        ended.add(request)
    request.chain.salt = "long"
    ended.add(request)
    request.chain.salt = "another"
    ended.add(request)
    assert not ended.of("longer")
    assert list(ended.of("long"))[-1] == 5
    assert list(ended.of("0")) == [5]


def test_tokens_of_earlier_responses_are_indexed_in_slices_too():
    source = drafts_of()
    end(source, range(5000, 5000 + RECENT))
    requests = [request_of(LATE + 30) for _ in range(5)]
    for number, request in enumerate(requests):
        request.id = number
        request.token_ids += [5040, 5041]
    whole = RECENT + LATE + 32
    indexed, steps = 0, 0
    while indexed < 5 * whole:
        propose(source, *requests)
        now = sum(source.texts[r.id].tokens for r in requests if r.id in source.texts)
        assert 0 < now - indexed <= SLICE + LATE
        indexed, steps = now, steps + 1
    assert steps >= 5 * whole // (SLICE + LATE)
    assert propose(source, *requests) == [[5042, 5043, 5044]] * 5


def test_a_request_without_memory_for_earlier_responses_is_indexed_alone():
    source = drafts_of(most_tokens=RECENT)
    end(source, range(5000, 5000 + RECENT))
    found, request = begin_like(source, [5, 6])
    assert found == [[7, 8, 9]]
    assert not source.texts[request.id].earlier
    assert source.reserved == 256
    source.end(request)
    assert source.reserved == 0


def test_guesses_for_tokens_of_earlier_responses_teach_no_chances():
    source = drafts_of()
    end(source, [1, 2, 3, 1, 2, 4] * 10)
    request = request_of(0)
    request.token_ids += [1, 2]
    source.begin()
    _, chances = source.propose(request, 1)
    assert chances == [first_chances()[4]]  # "2 4 1 2", with the end of the earlier response
