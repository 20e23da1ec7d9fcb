"""BeamSearch on models of three tokens, where all texts can be listed."""

import itertools
import math
import random

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.ipc import TokenLogprob
from cpuserve.sampling.beams import MOST_BEAMS, BeamRules, BeamSearchParams
from cpuserve.serving.generation.beam_search import BeamSearch

END, VOCAB, PROMPT = 0, 3, 5


def model_of(seed):
    """The logprobs of the next token after a text, which are random but always the same."""
    draws = random.Random(seed)
    known = {}

    def logprobs(tokens):
        if tokens not in known:
            weights = [draws.uniform(0.05, 1) ** 3 for _ in range(VOCAB)]
            known[tokens] = [math.log(weight / sum(weights)) for weight in weights]
        return known[tokens]

    return logprobs


def row_of(model, tokens):
    ranked = sorted(enumerate(model(tuple(tokens))), key=lambda each: -each[1])
    return TokenLogprob(*ranked[0], 1, ranked)


def searched(model, rules, ends, most, count):
    search = BeamSearch(PROMPT, rules, ends, most)
    steps = 0
    while not search.done:
        search.take([row_of(model, beam.tokens) for beam in search.running])
        steps += 1
    return search.best(count), steps


def every_text(model, most, penalty, ends):
    """The score and tokens of each text that ends, or has `most` tokens; the best one first."""
    found = []
    for length in range(1, most + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ended = tokens[-1] in ends
            if any(token in ends for token in tokens[:-1]) or (length < most and not ended):
                continue
            total = sum(model(tokens[:i])[token] for i, token in enumerate(tokens))
            found.append((total / (PROMPT + length - ended) ** penalty, [*tokens]))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0, -2.0])
def test_a_search_as_wide_as_the_tree_finds_the_best_of_all_texts(seed, penalty):
    model = model_of(seed)
    beams, _ = searched(model, BeamRules(8, penalty), {END}, 4, 8)
    wanted = every_text(model, 4, penalty, {END})[:8]
    assert [beam.tokens for beam in beams] == [tokens for _, tokens in wanted]
    assert [beam.score for beam in beams] == pytest.approx([score for score, _ in wanted])
    for beam in beams:
        assert (beam.end is not None) == (beam.tokens[-1] == END)
        assert beam.total == pytest.approx(sum(row.logprob for row in beam.logprobs))
        ranked = [row_of(model, beam.tokens[:i]).top for i in range(len(beam.tokens))]
        assert [top[row.rank - 1][0] for top, row in zip(ranked, beam.logprobs, strict=True)] == (
            beam.tokens
        )


def plain(model, width, penalty, most):
    """A beam search that keeps all in lists, and never ends before `most` tokens."""
    running, ended = [((), 0.0)], []
    for _ in range(most):
        grown = []
        for tokens, total in running:
            for token, logprob in row_of(model, tokens).top[: 2 * width]:
                grown.append(((*tokens, token), total + logprob))
        ended += [one for one in grown if one[0][-1] == END]
        going = sorted((one for one in grown if one[0][-1] != END), key=lambda one: -one[1])
        running = going[:width]

    def score(one):
        return one[1] / (PROMPT + len(one[0]) - (one[0][-1] == END)) ** penalty

    return [[*tokens] for tokens, _ in sorted([*ended, *running], key=lambda one: -score(one))]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 4.0, -3.0])
def test_a_narrow_search_finds_what_a_plain_one_finds_in_fewer_steps(width, penalty):
    fewer = 0
    for seed in range(40):
        beams, steps = searched(model_of(seed), BeamRules(width, penalty), {END}, 12, width)
        assert [beam.tokens for beam in beams] == plain(model_of(seed), width, penalty, 12)[:width]
        fewer += steps < 12
    assert fewer or penalty > 1, "no search was settled before its last step"


def test_without_ends_each_text_has_all_tokens():
    beams, steps = searched(model_of(1), BeamRules(2), (), 6, 2)
    assert {len(beam.tokens) for beam in beams} == {steps} == {6}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beam_width": 0}, "beams"),
        ({"beam_width": MOST_BEAMS + 1}, "beams"),
        ({"length_penalty": 1e3}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_value_out_of_range_is_refused(fields, named):
    with pytest.raises(InvalidRequest, match=named):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
