"""Pictures in the engine: encoded once, in slices, evicted, asked for, and never in the way."""

import itertools
import random
from array import array

import msgspec
import pytest

from cpuserve.config.speculation import Speculation
from cpuserve.core.ngram_drafts import indexed_tokens
from cpuserve.engine.ipc import Abort, AddRequest, PicturePatches
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config, fake_core, reference
from tests.helpers.fake_tower import FakeTower, pictured, pixels, prompt_with, seen

PARAMS = {"seed": 1, "max_tokens": 6}


def make(tower=None, media_rows=24, **changes):
    tower = tower or FakeTower()
    core = fake_core(fake_config(media_rows=media_rows, **changes), tower=tower)
    return core, tower


def add(core, number, ids, pictures=(), **params):
    params = SamplingParams(**{**PARAMS, **params})
    message = AddRequest(number, array("i", ids).tobytes(), params, 0.0)
    message.pictures = list(pictures)
    core.handle(message)


def turn(core):
    """One turn of the engine's loop: return the outputs of the step, and encode afterwards."""
    outputs = core.step().outputs
    core.after_sending()
    core.scheduler.check_invariants()
    return outputs


def run(core, most=2000):
    """Run until there is no work; return {request: its outputs}."""
    found = {}
    for _ in range(most):
        if not core.has_work:
            return found
        for output in turn(core):
            found.setdefault(output.id, []).append(output)
    raise AssertionError("it does not end")


def tokens(outputs):
    return list(itertools.chain.from_iterable(output.tokens for output in outputs))


def wanted(ids, pictures, **params):
    params = SamplingParams(**{**PARAMS, **params})
    return reference(seen(ids, pictures), params, 1, params.max_tokens)


def test_a_picture_is_encoded_before_its_placeholders_run():
    core, tower = make()
    ids, pictures = prompt_with(1, 2, 3, (5, 10), 4, 5)
    add(core, 0, ids, pictures)
    found = run(core)
    assert tokens(found[0]) == wanted(ids, pictures)
    assert tower.started == 1
    assert (core.stats.picture_queries, core.stats.picture_hits) == (1, 0)
    assert core.stats.encode_s > 0
    assert core.kv.num_free == core.kv.num_blocks


@pytest.mark.parametrize(
    "parts", [((5, 8),), (1, (5, 8)), ((5, 3), (6, 9)), (1, (5, 8), 2, (5, 8))]
)
def test_pictures_at_any_place_of_a_prompt(parts):
    core, tower = make()
    ids, pictures = prompt_with(*parts)
    add(core, 0, ids, pictures)
    assert tokens(run(core)[0]) == wanted(ids, pictures)
    assert tower.started == len({picture.digest for picture in pictures}), "each is encoded once"


def test_a_picture_of_several_runs_and_of_many_chunks():
    core, _ = make(max_num_batched_tokens=4)
    ids = [1, 2, *[9] * 7, 3, *[9] * 6, 4, *[9] * 3, 5]
    pictures = [pictured(7, (2, 7), (10, 6), (17, 3))]
    add(core, 0, ids, pictures)
    assert tokens(run(core)[0]) == wanted(ids, pictures)


def test_the_same_picture_again_computes_and_encodes_nothing():
    core, tower = make()
    ids, pictures = prompt_with(*range(10, 14), (5, 10), *range(20, 27))
    for number in range(2):
        add(core, number, ids, pictures)
        found = run(core)[number]
        assert tokens(found) == wanted(ids, pictures)
    assert tower.started == 1
    assert found[0].cached_tokens == (len(ids) - 1) // 4 * 4
    assert core.stats.picture_queries == 1, "the second prompt needed no rows"


def test_equal_tokens_with_another_picture_share_no_block_from_it_on():
    core, tower = make()
    for number, seed in enumerate((5, 6)):
        ids, pictures = prompt_with(*range(10, 18), (seed, 10), *range(20, 27))
        add(core, number, ids, pictures)
        found = run(core)[number]
        assert tokens(found) == wanted(ids, pictures)
    assert found[0].cached_tokens == 8, "the text before the picture"
    assert tower.started == 2


def test_digests_that_differ_in_the_last_byte_only_are_of_two_pictures():
    core, tower = make()
    for number, seed in enumerate((5, 6)):
        ids, pictures = prompt_with(*range(10, 18), (seed, 10), *range(20, 27))
        (picture,) = pictures
        one = msgspec.structs.replace(picture, digest=bytes(31) + bytes([number]))
        add(core, number, ids, [one])
        assert tokens(run(core)[number]) == wanted(ids, pictures)
    assert tower.started == 2


def test_a_picture_in_another_prompt_is_not_encoded_again():
    core, tower = make()
    for number in range(3):
        ids, pictures = prompt_with(30 + number, (5, 10), 4)
        add(core, number, ids, pictures)
        assert tokens(run(core)[number]) == wanted(ids, pictures)
    assert tower.started == 1
    assert (core.stats.picture_queries, core.stats.picture_hits) == (3, 2)


def test_the_least_recently_used_picture_is_evicted():
    core, tower = make(media_rows=24, enable_prefix_caching=False)
    for number, seed in enumerate((1, 2, 1, 3, 1, 2)):  # 3 evicts 2
        ids, pictures = prompt_with(8, (seed, 10), 4)
        add(core, number, ids, pictures)
        assert tokens(run(core)[number]) == wanted(ids, pictures)
    assert tower.started == 4
    assert core.stats.picture_hits == 2


def test_prompts_with_more_pictures_than_fit_take_turns_and_all_end():
    """The buffer holds one of these pictures, so a prompt that held two would block itself."""
    core, _ = make(media_rows=12, max_num_batched_tokens=8)
    prompts = []
    for number in range(6):
        parts = [(10 * number + i, 9 + i) for i in range(3)]
        ids, pictures = prompt_with(number, parts[0], 50, parts[1], parts[2], 51)
        prompts.append((ids, pictures))
        add(core, number, ids, pictures)
    found = run(core)
    for number, (ids, pictures) in enumerate(prompts):
        assert tokens(found[number]) == wanted(ids, pictures)


def test_preempted_prompts_get_their_rows_again():
    core, _ = make(kv_blocks=16, media_rows=12, max_num_seqs=8, enable_prefix_caching=False)
    prompts = []
    for number in range(8):
        prompts.append(prompt_with(number, (number, 11), 60))
        add(core, number, *prompts[-1], max_tokens=30)
    found = run(core, 20_000)
    assert core.stats.preemptions > 0, "the case itself"
    for number, (ids, pictures) in enumerate(prompts):
        assert tokens(found[number]) == wanted(ids, pictures, max_tokens=30)


def test_streams_go_on_while_a_picture_is_encoded():
    core, tower = make(FakeTower(rows_a_slice=1), itl_target_ms=50)
    add(core, 0, [1, 2, 3], max_tokens=40)
    while not any(output.tokens for output in turn(core)):
        pass
    ids, pictures = prompt_with(8, (5, 20), 4)
    add(core, 1, ids, pictures)
    while len(tower.slices) < 15:
        outputs = turn(core)
        assert [(output.id, len(output.tokens)) for output in outputs] == [(0, 1)]
    assert max(tower.slices) <= 0.05, "a slice and the step fit into the ITL target"
    assert tokens(run(core)[1]) == wanted(ids, pictures)


def test_prompts_and_the_tower_take_turns():
    core, tower = make(FakeTower(rows_a_slice=1), max_num_batched_tokens=4)
    ids, pictures = prompt_with((5, 20), 4)
    add(core, 0, ids, pictures)
    turn(core)
    begun = len(tower.slices)
    add(core, 1, list(range(100, 140)))
    sizes = []
    for _ in range(8):
        before = len(tower.slices)
        turn(core)
        sizes.append(len(tower.slices) - before)
    assert sizes in ([0, 1] * 4, [1, 0] * 4), (begun, sizes)


def test_the_engine_asks_for_patches_and_rests_until_they_come():
    core, tower = make()
    ids, _ = prompt_with(1, (5, 10), 4)
    full = prompt_with(1, (5, 10), 4)[1]
    add(core, 3, ids, [pictured(5, (1, 10), patches=False)])
    found = run(core)
    assert [(o.wants, o.tokens) for o in found[3]] == [([0], [])]
    assert not core.has_work
    assert tower.started == 0
    core.handle(PicturePatches(3, 0, pixels(5, 10)))
    assert tokens(run(core)[3]) == wanted(ids, full)


def test_patches_are_asked_for_only_when_they_are_needed_soon():
    core, _ = make(media_rows=40)
    for number in range(6):
        add(core, number, [9] * 10, [pictured(number, (0, 10), patches=False)])
    asked = {number for number, outputs in run(core).items() if outputs[0].wants}
    assert len(asked) == 2, "the patches of all waiting prompts could fill the memory"
    for _ in range(6):
        for number in asked:
            core.handle(PicturePatches(number, 0, pixels(number, 10)))
        asked = {number for number, outputs in run(core).items() if outputs[0].wants}
    assert not core.scheduler.requests


def test_a_request_that_leaves_passes_the_question_on():
    """Two requests wait for one picture; the one that was asked for its patches is aborted."""
    core, _ = make()
    ids, full = prompt_with((5, 10), 4)
    for number in range(2):
        add(core, number, ids, [pictured(5, (0, 10), patches=False)])
    (asked,) = run(core)
    core.handle(Abort([asked]))
    other = 1 - asked
    assert [output.wants for output in run(core)[other]] == [[0]]
    core.handle(PicturePatches(asked, 0, b"of a request that has left"))
    core.handle(PicturePatches(other, 0, pixels(5, 10)))
    assert tokens(run(core)[other]) == wanted(ids, full)


def test_an_abort_while_the_picture_is_encoded_frees_everything():
    core, tower = make(FakeTower(rows_a_slice=1), media_rows=10)
    add(core, 0, *prompt_with((5, 10), 4))
    turn(core)
    turn(core)
    assert tower.slices
    core.handle(Abort([0]))
    run(core)
    assert core.kv.num_free == core.kv.num_blocks
    ids, pictures = prompt_with((6, 10), 4)
    add(core, 1, ids, pictures)
    assert tokens(run(core)[1]) == wanted(ids, pictures), "the rows were free again"


@pytest.mark.parametrize("patches", [b"short", b""])
def test_a_picture_that_cannot_be_encoded_ends_only_its_requests(patches):
    core, _ = make(FakeTower(broken=77))
    good, broken = prompt_with((5, 10), 4), prompt_with((77, 10), 4)
    add(core, 0, *broken)
    add(core, 1, *broken)
    add(core, 2, *good)
    add(core, 3, good[0], [pictured(9, (0, 10), patches=False)])
    found = run(core)
    assert [output.wants for output in found[3]] == [[0]]
    core.handle(PicturePatches(3, 0, patches))
    found[3] = run(core)[3]
    for number in (0, 1):
        assert "the tower is broken" in found[number][-1].error
    assert "could not be encoded" in found[3][-1].error
    assert tokens(found[2]) == wanted(*good)
    assert not core.scheduler.requests


@pytest.mark.parametrize(("rows", "why"), [(25, "at most 24 tokens"), (1, "reads no pictures")])
def test_a_picture_that_the_engine_cannot_take_is_refused(rows, why):
    core = make()[0] if rows > 1 else fake_core()
    add(core, 0, *prompt_with((5, rows), 4))
    assert why in run(core)[0][0].error


def test_prompt_logprobs_have_none_for_placeholders():
    core, _ = make(max_num_batched_tokens=4)
    ids, pictures = prompt_with(1, 2, (5, 9), 3, 4, (6, 3))
    add(core, 0, ids, pictures, prompt_logprobs=1)
    (scored,) = [o.prompt_logprobs for o in run(core)[0] if o.prompt_logprobs]
    hidden = {0, *range(2, 11), *range(13, 16)}
    assert [i for i, row in enumerate(scored) if row is None] == sorted(hidden)
    assert [row.token for row in scored if row is not None] == [2, 3, 4]


def test_a_sampler_counts_no_placeholders():
    core, _ = make()
    ids, pictures = prompt_with(1, 2, (5, 9), 3)
    add(core, 0, ids, pictures, repetition_penalty=1.5)
    while not core.executor.model.slots:
        turn(core)
    assert [slot.prompt_ids for slot in core.executor.model.slots.values()] == [[1, 2, 3]]


def test_drafts_do_not_copy_placeholders():
    """The text before the picture comes again, so the placeholders would be the next guess."""
    speculation = Speculation(
        method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=3
    )
    core, _ = make(speculation=speculation)
    ids, pictures = prompt_with(30, 31, 32, (5, 9), 40, 30, 31, 32)
    add(core, 0, ids, pictures, max_tokens=12)
    request = core.scheduler.requests[0]
    assert indexed_tokens(request, 0, len(ids)) == [30, 31, 32, 40, 30, 31, 32]
    assert tokens(run(core)[0]) == wanted(ids, pictures, max_tokens=12)


def test_every_token_after_a_picture_has_its_angle_in_every_step():
    """In chunks, after a preemption, for scored prompts, for outputs and for draft tokens."""
    tower = FakeTower()
    tower.turned_merge = 1
    few = {"kv_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    core, _ = make(tower, 12, enable_prefix_caching=False, **few)
    schedule, chunks = core.scheduler.schedule, []

    def watched():
        batch = schedule()
        for request, chunk in zip(core.scheduler.batch_requests, batch.chunks, strict=True):
            chunks.append((request, chunk))
        return batch

    core.scheduler.schedule = watched
    for number in range(8):
        ids, pictures = prompt_with(number, (number, 11), *[30, 31, 32, 33] * 8)
        add(core, number, ids, pictures, max_tokens=30, prompt_logprobs=0)
    add(core, 8, range(40), max_tokens=30)
    run(core, 20_000)
    assert core.stats.preemptions > 0, "the case itself"
    request, chunk = next(pair for pair in reversed(chunks) if pair[0].pictures)
    chunk.token_ids += [7, 8]
    chunk.num_drafts = 2
    core.scheduler.pictures.turn([request], [chunk])
    for request, chunk in chunks:
        placed, end = request.chain.placeholders, chunk.start + len(chunk.token_ids)
        wanted = None if placed is None else placed.angles(chunk.start, end, 1)
        assert chunk.angles == wanted
        assert wanted is None or {len(axis) for axis in wanted} == {len(chunk.token_ids)}
        assert (wanted is None) == (placed is None or end <= 1)


@pytest.mark.parametrize("seed", range(12))
def test_random_prompts_aborts_and_late_patches_leave_nothing_behind(seed):
    """Few blocks and few media rows: prompts are preempted, and pictures evicted, all the time."""
    rng = random.Random(seed)
    tower = FakeTower(rows_a_slice=rng.choice((1, 5, 100)), broken=3)
    core, _ = make(
        tower,
        media_rows=rng.choice((12, 20, 60)),
        kv_blocks=rng.choice((20, 64)),
        max_num_batched_tokens=rng.choice((8, 32)),
        enable_prefix_caching=rng.random() < 0.7,
    )
    prompts, found, asked = {}, {}, []
    for number in range(30):
        parts = []
        for _ in range(rng.randrange(1, 4)):
            parts += [rng.randrange(20, 60) for _ in range(rng.randrange(6))]
            if rng.random() < 0.8:
                parts.append((rng.randrange(8), rng.choice((4, 12))))
        ids, pictures = prompt_with(*parts, 7)
        prompts[number] = ids, pictures
        bare = [msgspec.structs.replace(each, patches=None) for each in pictures]
        add(core, number, ids, bare if rng.random() < 0.5 else pictures)
        for _ in range(rng.randrange(8)):
            advance(core, rng, prompts, found, asked)
        if rng.random() < 0.2:
            gone = rng.randrange(number + 1)
            core.handle(Abort([gone]))
    for _ in range(5000):
        if not core.scheduler.requests:
            break
        advance(core, rng, prompts, found, asked)
    assert not core.scheduler.requests
    run(core)
    ended = 0
    for number, outputs in found.items():
        last = outputs[-1]
        if last.error:
            assert any(each.patches[0] == 3 for each in prompts[number][1]), last.error
        elif last.finish:
            assert tokens(outputs) == wanted(*prompts[number])
            ended += 1
    assert ended > 10
    assert core.kv.num_free == core.kv.num_blocks
    core.scheduler.check_invariants()


def advance(core, rng, prompts, found, asked):
    """Run one turn; sometimes send some of the patches that the engine has asked for."""
    if core.has_work:
        for output in turn(core):
            asked += [(output.id, index) for index in output.wants]
            if not output.wants:
                found.setdefault(output.id, []).append(output)
    if asked and (not core.has_work or rng.random() < 0.3):
        number, index = asked.pop(rng.randrange(len(asked)))
        core.handle(PicturePatches(number, index, prompts[number][1][index].patches))


@pytest.mark.parametrize("budget", [12, 13, 20, 64])
@pytest.mark.parametrize("threshold", [0, 3])
def test_no_step_cuts_a_picture_that_is_seen_whole(budget, threshold):
    core, _ = make(
        picture_span=8,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    prompts = [
        prompt_with(*range(10, 19), (5, 8), 1, 2, (6, 8), 3),
        prompt_with((7, 8), *range(20, 45)),
        prompt_with(*range(50, 95)),
    ]
    parts = {}
    for number, (ids, pictures) in enumerate(prompts):
        add(core, number, ids, pictures, max_tokens=30)
    found = {}
    schedule = core.scheduler.schedule

    def noted():
        batch = schedule()
        for request, chunk in zip(core.scheduler.batch_requests, batch.chunks, strict=True):
            parts.setdefault(request.id, []).append(
                (chunk.start, chunk.start + len(chunk.token_ids))
            )
        return batch

    core.scheduler.schedule = noted
    found = run(core)
    for number, (ids, pictures) in enumerate(prompts):
        assert tokens(found[number]) == wanted(ids, pictures, max_tokens=30)
        for begin, count in (span for picture in pictures for span in picture.spans):
            assert not [end for _, end in parts[number] if begin < end < begin + count]
    assert (core.scheduler.pictures.num_spans > 0) == (threshold > 0)
