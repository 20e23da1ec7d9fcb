"""Prompts and lengths of the datasets."""

import asyncio
import base64
import json
from statistics import median

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.bench.noise import buckets_of
from cpuserve.bench.workload import Workload, talks
from cpuserve.cli.bench_flags import DATASETS


async def words(text):
    return len(text.split())


def made(**kwargs):
    return asyncio.run(talks(Workload(**{"num_prompts": 20, **kwargs}), words))


def lengths(found):
    return [(len(t.prompt), t.answer) for talk in found for t in talk]


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_seed_makes_the_same_requests_again(dataset):
    one, same, other = (made(dataset=dataset, input_len=8, seed=s) for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_random_has_the_length_asked_within_the_ratio():
    assert set(lengths(made(input_len=10, output_len=5))) == {(10, 5)}
    varied = lengths(made(input_len=100, output_len=50, range_ratio=0.2, num_prompts=200))
    prompts, answers = zip(*varied, strict=True)
    assert 80 <= min(prompts) < 100 < max(prompts) <= 120
    assert 40 <= min(answers) < 50 < max(answers) <= 60


@pytest.mark.parametrize("vocab", [1, 2, 200, 300, 310, 100000])
def test_ids_stay_inside_a_small_vocabulary_and_are_different(vocab):
    found = made(input_len=64, vocab=vocab)
    ids = {i for talk in found for t in talk for i in t.prompt}
    assert ids <= set(range(vocab // 2 if vocab < 600 else 300, vocab))
    if vocab >= 200:
        assert len(ids) > 90
        assert len({tuple(t.prompt[:32]) for talk in found for t in talk}) == 20


def test_prefix_repetition_shares_so_many_beginnings():
    found = made(dataset="prefix_repetition", prefix_len=6, input_len=4, num_prefixes=3)
    begins = [tuple(talk[0].prompt[:6]) for talk in found]
    assert len(set(begins)) == 3
    assert len({tuple(talk[0].prompt) for talk in found}) == 20
    counts = sorted(begins.count(b) for b in set(begins))
    assert counts == [6, 7, 7]


def test_multi_turn_has_turns_after_one_prefix():
    found = made(dataset="multi-turn", prefix_len=5, input_len=3, turns=4, output_len=2)
    assert [lengths([talk]) for talk in found] == [[(8, 2), (3, 2), (3, 2), (3, 2)]] * 20
    assert len({tuple(talk[0].prompt[:5]) for talk in found}) == 1


def test_sharegpt_lengths_look_like_the_published_ones():
    prompts, answers = zip(*lengths(made(dataset="sharegpt", num_prompts=4000)), strict=True)
    assert 90 <= median(prompts) <= 110
    assert 135 <= median(answers) <= 165
    assert min(prompts) >= 4
    assert max(prompts) <= 1024


def talk_of(*texts):
    return {"conversations": [{"from": "x", "value": text} for text in texts]}


def test_sharegpt_files_are_filtered_by_the_servers_tokens(tmp_path):
    good = talk_of("a b c d e", "one two three four", "more")
    listed = [
        good,
        talk_of("too short", "a b c d"),
        talk_of("a b c d"),
        talk_of("w " * 1100, "a " * 9),
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(listed))
    found = made(dataset="sharegpt", path=str(path), num_prompts=3)
    assert [(t.prompt, t.answer) for talk in found for t in talk] == [("a b c d e", 4)] * 3
    found = made(dataset="sharegpt", path=str(path), num_prompts=1, answer_len=7)
    assert found[0][0].answer == 7


@pytest.mark.parametrize(
    ("text", "needle"),
    [("{", "not a JSON list"), ('{"a": 1}', "not a JSON list"), ("[]", "no conversation")],
)
def test_another_file_is_refused(tmp_path, text, needle):
    path = tmp_path / "talks.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=needle):
        made(dataset="sharegpt", path=str(path))


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match="No such file"):
        made(dataset="sharegpt", path="/no/such/file")


def test_random_pictures_have_the_sizes_and_numbers_of_the_workload():
    from io import BytesIO

    from PIL import Image

    sizes = buckets_of("{(20, 30, 1): 0.5, (8, 9, 1): 0.5, (4, 4, 16): 0.0}")
    settings = Workload(
        "random-mm", 40, 8, 2, pictures=2, pictures_range=0.5, picture_sizes=sizes, seed=3
    )
    made = asyncio.run(talks(settings))
    assert made == asyncio.run(talks(settings))
    assert {len(talk[0].pictures) for talk in made} == {1, 2, 3}
    shown = [picture for talk in made for picture in talk[0].pictures]
    assert {(each.height, each.width) for each in shown} == {(20, 30), (8, 9)}
    assert len({each.url for each in shown}) == len(shown)
    for each in shown[:5]:
        with Image.open(BytesIO(base64.b64decode(each.url.partition(",")[2]))) as image:
            image.load()
            assert (image.size, image.mode) == ((each.width, each.height), "RGB")


@pytest.mark.parametrize(
    "text", ["", "3", "{}", "{(1, 2): 1}", "{(0, 1, 1): 1}", "{(9, 9, 16): 1}", "{(9, 9, 1): -1}",
             "(" * 10_000, "{(99999, 1, 1): 1.0}"],
)  # fmt: skip
def test_wrong_sizes_of_pictures_are_one_line(text):
    with pytest.raises(ConfigError, match="--random-mm-bucket-config"):
        buckets_of(text)
