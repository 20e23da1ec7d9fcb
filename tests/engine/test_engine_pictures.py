"""Pictures in the engine: encoded once, in slices, evicted, asked for, and never in the way."""

import itertools
import random
from array import array

import msgspec
import pytest

from cpuserve.config.speculation import Speculation
from cpuserve.core.kv.block_file import HEAD
from cpuserve.core.speculation.ngram_drafts import indexed_tokens
from cpuserve.engine.ipc import Abort, AddRequest, MediaPayload
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config, fake_core, reference
from tests.helpers.fake_tower import FakeTower, pictured, pixels, prompt_with, seen

pytestmark = pytest.mark.usefixtures("patient_closes")
PARAMS = {"seed": 1, "max_tokens": 6}
PART_FILE = HEAD.size + 32 + 4 + 3 * 4  # bytes of a file with three rows of a picture


def make(tower=None, media_rows=24, **changes):
    tower = tower or FakeTower()
    core = fake_core(fake_config(media_rows=media_rows, **changes), tower=tower)
    return core, tower


def add(core, number, ids, pictures=(), **params):
    params = SamplingParams(**{**PARAMS, **params})
    message = AddRequest(number, array("i", ids).tobytes(), params, 0.0)
    message.media = list(pictures)
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
    assert (core.stats.media_queries, core.stats.media_hits) == (1, 0)
    assert core.stats.encode_s > 0
    assert core.kv.num_free == core.kv.num_blocks


def test_a_prompt_waits_for_its_picture_and_says_so():
    core, _ = make(FakeTower(rows_a_slice=1))
    ids, pictures = prompt_with(1, 2, 3, (5, 10), 4, 5)
    add(core, 0, ids, pictures)
    outputs = run(core)[0]
    (first,) = [output for output in outputs if output.scheduled]
    assert set(first.held) == {"media"}
    assert first.held["media"] > 0
    assert set(first.queued) == {"step"}
    assert not any(output.held for output in outputs if output is not first)


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
    assert core.stats.media_queries == 1, "the second prompt needed no rows"


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
    assert (core.stats.media_queries, core.stats.media_hits) == (3, 2)


def test_the_least_recently_used_picture_is_evicted():
    core, tower = make(media_rows=24, enable_prefix_caching=False)
    for number, seed in enumerate((1, 2, 1, 3, 1, 2)):  # 3 evicts 2
        ids, pictures = prompt_with(8, (seed, 10), 4)
        add(core, number, ids, pictures)
        assert tokens(run(core)[number]) == wanted(ids, pictures)
    assert tower.started == 4
    assert core.stats.media_hits == 2


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


def test_rows_of_a_picture_are_written_in_slices(monkeypatch):
    monkeypatch.setattr("cpuserve.engine.media.WRITE_BYTES", 12)  # three rows of one float
    core, _ = make(itl_target_ms=50)
    core.scheduler.cost.allowance = lambda *_: 0.0  # seconds of a slice
    add(core, 0, [1, 2, 3], max_tokens=40)
    while not any(output.tokens for output in turn(core)):
        pass
    write, sizes = core.executor.write_media, []
    monkeypatch.setattr(
        core.executor, "write_media", lambda row, rows: (sizes.append(len(rows)), write(row, rows))
    )
    ids, pictures = prompt_with(8, (5, 20), 4)
    add(core, 1, ids, pictures)
    while len(sizes) < 7:
        before = len(sizes)
        assert [(output.id, len(output.tokens)) for output in turn(core)] == [(0, 1)]
        assert len(sizes) <= before + 1, "a slice writes one part, if it has no time for more"
    assert sizes == [3] * 6 + [2]
    assert tokens(run(core)[1]) == wanted(ids, pictures)


def test_small_pictures_of_several_callers_are_encoded_together():
    core, tower = make(FakeTower(together=10), media_rows=40)
    prompts = [prompt_with(7, (seed, 3), 4) for seed in range(1, 8)]
    for number, (ids, pictures) in enumerate(prompts):
        add(core, number, ids, pictures)
    found = run(core)
    for number, (ids, pictures) in enumerate(prompts):
        assert tokens(found[number]) == wanted(ids, pictures)
    assert tower.started == 3, "3, 3 and 1 pictures of 3 patches"
    assert core.encoder.num_encoded == 7


def test_a_picture_of_a_modest_caller_is_encoded_before_many_of_a_greedy_one():
    """In the order of arrival, it would wait for the pictures of all requests of the other."""
    core, _ = make(FakeTower(together=10, rows_a_slice=1), media_rows=40)
    for number in range(4):
        add(core, number, *prompt_with(7, (number + 1, 11), 4), caller="greedy")
    while len(core.scheduler.media.wanted) < 4:
        turn(core)
    add(core, 4, *prompt_with(7, (5, 3), 4), caller="modest")
    found = run(core)
    assert len(found) == 5
    assert list(found).index(4) <= 1, "it waits for the picture that is encoded, and no other"
    # Its next one is in turn as well, and a picture that both want is encoded once.
    both = prompt_with(7, (9, 11), 4)
    for number in range(5, 9):
        shown = prompt_with(8, (number + 6, 11), 4) if number < 8 else both
        add(core, number, *shown, caller="greedy")
    while len(core.scheduler.media.wanted) < 4:
        turn(core)
    add(core, 9, *both, caller="modest")
    found = run(core)
    assert max(list(found).index(number) for number in (8, 9)) <= 2


def test_a_large_picture_is_encoded_alone():
    core, tower = make(FakeTower(together=10), media_rows=40)
    for number, count in enumerate((11, 3, 11, 4, 4)):
        add(core, number, *prompt_with(7, (number + 1, count), 4))
    run(core)
    assert tower.started == 4


def test_a_picture_that_fails_among_others_ends_only_its_request():
    core, tower = make(FakeTower(together=20, broken=2), media_rows=40)
    prompts = [prompt_with(7, (seed, 3), 4) for seed in (1, 2, 3)]
    for number, (ids, pictures) in enumerate(prompts):
        add(core, number, ids, pictures)
    found = run(core)
    assert found[1][-1].error == "a picture could not be encoded: the tower is broken"
    for number in (0, 2):
        assert tokens(found[number]) == wanted(*prompts[number])
    assert tower.started == 4, "all together, and then one by one"
    add(core, 3, *prompt_with(7, (4, 3), 4))
    add(core, 4, *prompt_with(7, (5, 3), 4))
    run(core)
    assert tower.started == 5, "the following ones together again"


def test_the_others_are_encoded_if_a_request_leaves_meanwhile():
    core, tower = make(FakeTower(together=20, rows_a_slice=1), media_rows=12)
    prompts = [prompt_with(7, (seed, 3), 4) for seed in (1, 2, 3)]
    for number, (ids, pictures) in enumerate(prompts):
        add(core, number, ids, pictures)
    while not tower.slices:
        turn(core)
    core.handle(Abort([0]))
    add(core, 3, *prompt_with(7, (9, 6), 4))  # it may get the rows of the first picture
    found = run(core)
    for number in (1, 2):
        assert tokens(found[number]) == wanted(*prompts[number])
    assert tokens(found[3]) == wanted(*prompt_with(7, (9, 6), 4))
    assert tower.started == 2


def test_patches_of_pictures_that_are_encoded_together_are_asked_for_together():
    core, _ = make(FakeTower(together=6), media_rows=40)
    for number in range(6):
        ids, _ = prompt_with(7, (number + 1, 3), 4)
        add(core, number, ids, [pictured(number + 1, (1, 3), patches=False)])
    wants = [output.id for output in turn(core) if output.wants]
    assert wants == [0, 1, 2, 3], "as many as two steps of the tower have"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The settings of an engine that keeps pictures on disk, three rows in each file."""
    monkeypatch.setattr("cpuserve.engine.media.WRITE_BYTES", 12)
    return {"prefix_cache_dir": str(tmp_path), "media_rows": 40}


def files_of(path):
    """The files of parts of pictures; blocks of the KV cache are larger."""
    return sorted(file for file in path.rglob("*.kv") if file.stat().st_size <= PART_FILE)


def after_restart(core, kept, ids, pictures, tower=None):
    """The tokens of a prompt in the next engine, whose prefix cache does not have it."""
    core.close()
    core, tower = make(tower, **kept)
    add(core, 0, ids, pictures)
    return core, tower, run(core)


def test_an_encoded_picture_is_read_from_disk_after_a_restart(kept, tmp_path):
    core, tower = make(**kept)
    ids, pictures = prompt_with(7, (5, 20), 4)
    add(core, 0, ids, pictures)
    run(core)
    core.close()
    assert len(files_of(tmp_path)) == 7
    # The pixels are not even asked for, and the other text needs no block of the first one.
    ids, full = prompt_with(8, (5, 20), 3)
    core, tower, found = after_restart(core, kept, ids, [pictured(5, (1, 20), patches=False)])
    assert tokens(found[0]) == wanted(ids, full)
    assert not any(output.wants for output in found[0])
    assert (tower.started, core.encoder.num_encoded, core.encoder.num_restored) == (0, 0, 1)


def test_another_picture_is_not_read_from_disk(kept):
    core, _ = make(**kept)
    add(core, 0, *prompt_with(7, (5, 20), 4))
    run(core)
    ids, pictures = prompt_with(7, (6, 20), 4)
    core, tower, found = after_restart(core, kept, ids, pictures)
    assert tokens(found[0]) == wanted(ids, pictures)
    assert (tower.started, core.encoder.num_restored) == (1, 0)


@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "swapped", "empty"])
def test_a_damaged_file_of_a_picture_is_encoded_again(kept, tmp_path, damage):
    core, _ = make(**kept)
    ids, pictures = prompt_with(7, (5, 20), 4)
    add(core, 0, ids, pictures)
    run(core)
    core.close()
    files = [file for file in files_of(tmp_path) if file.stat().st_size == PART_FILE]
    raw = files[3].read_bytes()
    changed = {
        "short": raw[:-1],
        "flipped": raw[:-1] + bytes([raw[-1] ^ 1]),
        "swapped": files[2].read_bytes(),
        "empty": b"",
    }
    if damage == "missing":
        files[3].unlink()
    else:
        files[3].write_bytes(changed[damage])
    ids, full = prompt_with(8, (5, 20), 4)
    core, tower = make(**kept)
    add(core, 0, ids, [pictured(5, (1, 20), patches=False)])
    found = run(core)
    assert [output.wants for output in found[0] if output.wants] == [[0]]
    core.handle(MediaPayload(0, 0, pixels(5, 20)))
    assert tokens(run(core)[0]) == wanted(ids, full)
    assert (tower.started, core.encoder.num_restored) == (1, 0)
    ids, full = prompt_with(9, (5, 20), 4)
    core, tower, found = after_restart(core, kept, ids, full)
    assert tokens(found[0]) == wanted(ids, full)
    assert (tower.started, core.encoder.num_restored) == (0, 1), "the file was written again"


def test_the_files_of_another_tower_are_not_read(kept, tmp_path):
    core, _ = make(**kept)
    ids, pictures = prompt_with(7, (5, 20), 4)
    add(core, 0, ids, pictures)
    run(core)
    (tmp_path / "model").mkdir()
    other = {**kept, "model_path": str(tmp_path / "model")}
    (tmp_path / "model" / "config.json").write_text("{}")
    core, tower, found = after_restart(core, other, ids, pictures)
    assert tokens(found[0]) == wanted(ids, pictures)
    assert (tower.started, core.encoder.num_restored) == (1, 0)


def test_pictures_are_read_from_disk_in_slices_between_steps(kept):
    core, _ = make(**kept)
    ids, pictures = prompt_with(7, (5, 20), 4)
    add(core, 0, ids, pictures)
    run(core)
    core.close()
    core, tower = make(itl_target_ms=50, **kept)
    core.scheduler.cost.allowance = lambda *_: 0.0  # seconds of a slice
    add(core, 0, [1, 2, 3], max_tokens=40)
    while not any(output.tokens for output in turn(core)):
        pass
    files, reads = core.encoder._files, []
    load = files.load
    files.load = lambda picture, part: reads.append(part) or load(picture, part)
    other, full = prompt_with(8, (5, 20), 3)
    add(core, 1, other, full)
    while len(reads) < 7:
        before = len(reads)
        assert [(output.id, len(output.tokens)) for output in turn(core)] == [(0, 1)]
        assert len(reads) <= before + 1
    assert tokens(run(core)[1]) == wanted(other, full)
    assert tower.started == 0


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
    core.handle(MediaPayload(3, 0, pixels(5, 10)))
    assert tokens(run(core)[3]) == wanted(ids, full)


def test_patches_are_asked_for_only_when_they_are_needed_soon():
    core, _ = make(media_rows=40)
    for number in range(6):
        add(core, number, [9] * 10, [pictured(number, (0, 10), patches=False)])
    asked = {number for number, outputs in run(core).items() if outputs[0].wants}
    assert len(asked) == 2, "the patches of all waiting prompts could fill the memory"
    for _ in range(6):
        for number in asked:
            core.handle(MediaPayload(number, 0, pixels(number, 10)))
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
    core.handle(MediaPayload(asked, 0, b"of a request that has left"))
    core.handle(MediaPayload(other, 0, pixels(5, 10)))
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
    core.handle(MediaPayload(3, 0, patches))
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
    request, chunk = next(pair for pair in reversed(chunks) if pair[0].media)
    chunk.token_ids += [7, 8]
    chunk.num_drafts = 2
    core.scheduler.media.turn([request], [chunk])
    grid_of = core.executor.towers["image"].grid
    for request, chunk in chunks:
        placed, end = request.chain.placeholders, chunk.start + len(chunk.token_ids)
        wanted = None if placed is None else placed.angles(chunk.start, end, grid_of)
        assert chunk.angles == wanted
        assert wanted is None or {len(axis) for axis in wanted} == {len(chunk.token_ids)}
        assert (wanted is None) == (placed is None or end <= 1)


@pytest.mark.parametrize("seed", range(12))
def test_random_prompts_aborts_and_late_patches_leave_nothing_behind(seed, kept):
    """Few blocks and few media rows: prompts are preempted, and pictures evicted, all the time."""
    rng = random.Random(seed)
    together = rng.choice((0, 8, 40))
    tower = FakeTower(rows_a_slice=rng.choice((1, 5, 100)), broken=3, together=together)
    core, _ = make(
        tower,
        media_rows=rng.choice((12, 20, 60)),
        kv_blocks=rng.choice((20, 64)),
        max_num_batched_tokens=rng.choice((8, 32)),
        enable_prefix_caching=rng.random() < 0.7,
        prefix_cache_dir=kept["prefix_cache_dir"] if rng.random() < 0.5 else None,
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
        bare = [msgspec.structs.replace(each, payload=None) for each in pictures]
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
            assert any(each.payload[0] == 3 for each in prompts[number][1]), last.error
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
        core.handle(MediaPayload(number, index, prompts[number][1][index].payload))


@pytest.mark.parametrize("budget", [12, 13, 20, 64])
@pytest.mark.parametrize("threshold", [0, 3])
def test_no_step_cuts_a_picture_that_is_seen_whole(budget, threshold):
    core, _ = make(
        media_span=8,
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
    assert (core.scheduler.media.num_spans > 0) == (threshold > 0)
