"""Swap space and disk cache of an engine: less is computed, and tokens never change."""

import logging
import math
import os
import threading
import time
from array import array
from types import SimpleNamespace

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.engine.build import build_engine
from cpuserve.engine.fingerprint import fingerprint
from cpuserve.engine.ipc import Abort, AddRequest, TierStats
from cpuserve.engine.offload import check_tiers
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config, fake_core, reference
from tests.helpers.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("patient_closes")
PROMPT = [(7 * i) % 300 for i in range(41)]


def make(**changes):
    core = fake_core(fake_config(**changes))
    core.scheduler.cost.restores = lambda *_: True  # the fake computes faster than any disk
    return core


def ask(core, prompt=PROMPT, max_tokens=6, **params):
    """Run one request alone; return (tokens, cached tokens)."""
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, **params)
    core.handle(AddRequest(ask.number, array("i", prompt).tobytes(), sampling, 0.0))
    ask.number += 1
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == reference(prompt, sampling, 1, max_tokens)
    assert core.check() == {"ok": True}
    return outputs[0].cached_tokens


ask.number = 0


def evict_all(core, left_s=math.inf):
    """Evict all cached blocks, as other requests do, with `left_s` seconds to save them."""
    if core.kv.offload is not None:
        core.kv.offload.left_s = left_s
    taken = core.kv.pool.take(core.kv.num_free)
    for block in taken:
        core.executor.model.kv[block] = [-7] * core.kv.block_size
    core.kv.pool.release(taken)


def tidy(core):
    while core.tidy():
        pass


def test_evicted_blocks_come_back_from_the_swap_space():
    core = make(swap_bytes=1 << 20)
    assert ask(core) == 0
    evict_all(core)
    assert core.report()["swap_blocks"] == 11
    assert ask(core) == 40
    report = core.report()
    assert (report["blocks_saved"], report["blocks_restored"]) == (11, 10)
    assert report["swap_blocks"] == 1
    assert ask(core) == 40, "restored blocks are in the cache again"
    assert ask(core, PROMPT[:20]) == 16
    assert core.report()["blocks_restored"] == 10
    stats = core.stats
    assert stats.tiers == {"swap": TierStats(1, core.kv.offload.blocks.sizes[0], 10)}


def test_swap_space_keeps_its_size_and_salts_apart():
    core = make(swap_bytes=5 * 16)
    ask(core, cache_salt="a")
    evict_all(core)
    assert core.report()["swap_blocks"] == 5
    assert ask(core, cache_salt="b") == 0
    assert ask(core) == 0


@pytest.mark.parametrize("swap_bytes", [0, 15])
def test_without_swap_space_for_a_block_nothing_comes_back(swap_bytes):
    core = make(swap_bytes=swap_bytes)
    ask(core)
    evict_all(core)
    assert core.kv.offload is None
    assert ask(core) == 0


def test_preempted_requests_are_restored_and_not_computed_again():
    outputs = {}
    for swap in (0, 1 << 20):
        core = make(kv_blocks=16, max_num_seqs=16, swap_bytes=swap)
        for number in range(12):
            prompt = [number + 1] * 20
            sampling = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
            core.handle(AddRequest(number, array("i", prompt).tobytes(), sampling, 0.0))
        computed, tokens = 0, {}
        while core.has_work:
            for output in core.step().outputs:
                tokens.setdefault(output.id, []).extend(output.tokens)
            computed += core.scheduler.work.tokens
        assert core.stats.preemptions > 0
        assert core.check() == {"ok": True}
        outputs[swap] = computed
        for number in range(12):
            want = reference([number + 1] * 20, SamplingParams(), 1, 40)
            assert tokens[number] == want
    assert outputs[1 << 20] < outputs[0]


def test_scored_prompts_are_computed_whatever_is_stored():
    core = make(swap_bytes=1 << 20)
    ask(core)
    evict_all(core)
    assert ask(core, prompt_logprobs=1) == 0


def test_prefixes_survive_a_restart(tmp_path):
    config = {"prefix_cache_dir": str(tmp_path)}
    core = make(**config)
    assert ask(core) == 0
    tidy(core)
    core.close()
    core = make(**config)
    assert core.report()["disk_blocks"] == 11
    assert ask(core) == 40
    stats = core.stats
    size = sum(f.stat().st_size for f in tmp_path.glob("**/*.kv"))
    assert stats.tiers == {"disk": TierStats(11, size, 10)}
    assert ask(core, cache_salt="other") == 0
    assert ask(core, [1, *PROMPT[1:]]) == 0
    evict_all(core)
    assert ask(core) == 40
    core.close()


def test_prefixes_of_another_server_are_found_and_kept_as_they_are(tmp_path):
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    core = make(prefix_cache_dir=str(theirs))
    ask(core)
    core.close()
    before = {path: path.stat().st_mtime_ns for path in theirs.glob("**/*")}
    config = {"kv_tiers": {"shared": str(theirs)}, "prefix_cache_dir": str(own)}
    core = make(**config)
    assert ask(core) == 40
    assert (core.stats.tiers["shared"].hits, core.stats.tiers["disk"].hits) == (10, 0)
    assert core.report()["shared_blocks"] == 11
    assert ask(core, [1, *PROMPT[1:]]) == 0
    core.close()
    core = make(**config)
    assert ask(core) == 40
    assert core.stats.tiers["disk"].hits == 10, "its own files are faster"
    core.close()
    assert {path: path.stat().st_mtime_ns for path in theirs.glob("**/*")} == before


def test_a_tier_that_cannot_be_used_is_left_out(tmp_path, caplog):
    core = make(kv_tiers={"shared": str(tmp_path / "missing")})
    assert core.kv.offload is None
    assert "the KV tier shared cannot be used" in caplog.text
    assert ask(core) == 0


def test_a_tier_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="there is no tier 'cloud'; there are: shared"):
        check_tiers(fake_config(kv_tiers={"cloud": "x"}))


def test_close_saves_what_no_idle_moment_has(tmp_path):
    core = make(prefix_cache_dir=str(tmp_path))
    ask(core)
    core.close()
    assert ask(make(prefix_cache_dir=str(tmp_path))) == 40


def test_eviction_saves_to_disk_without_an_idle_moment(tmp_path):
    core = make(prefix_cache_dir=str(tmp_path))
    ask(core)
    evict_all(core)
    wait_until(lambda: core.report()["disk_blocks"] == 11)
    assert ask(core) == 40


def test_damaged_files_cost_the_hit_and_nothing_else(tmp_path):
    # The whole prompt in one step: what follows a damaged block is not restored in the next.
    config = {"prefix_cache_dir": str(tmp_path), "max_num_batched_tokens": 64}
    core = make(**config)
    ask(core)
    core.close()
    files = sorted(tmp_path.glob("**/*.kv"))
    for path in files[::2]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    hits = []
    for _ in range(len(files)):  # each run finds the first damaged file and replaces it
        core = make(**config)
        hits.append(ask(core))
        core.close()
    assert hits[0] < 40
    assert hits == sorted(hits)
    assert hits[-1] == 40


def test_failed_steps_leave_nothing_on_disk(tmp_path):
    config = fake_config(prefix_cache_dir=str(tmp_path))

    def fault(step, outputs):
        msg = "no"
        raise RuntimeError(msg)

    core = fake_core(config, fault=fault)
    core.handle(AddRequest(0, array("i", PROMPT).tobytes(), SamplingParams(), 0.0))
    while core.has_work:
        core.step()
    tidy(core)
    core.close()
    assert not list(tmp_path.glob("**/*.kv"))


def test_a_directory_with_foreign_files_is_refused_before_the_model_is_read(tmp_path):
    (tmp_path / "cpuserve-prefix-cache").mkdir()
    (tmp_path / "cpuserve-prefix-cache" / "thesis.kv").write_text("")
    config = fake_config(prefix_cache_dir=str(tmp_path), model_path="/nonexistent")
    with pytest.raises(ConfigError, match="contains files of another program"):
        build_engine(config)
    with pytest.raises(ConfigError, match="contains files of another program"):
        fake_core(config)


def test_a_directory_that_cannot_be_used_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "cpuserve"):
        core = make(prefix_cache_dir=str(tmp_path / "file"))
    assert len(caplog.records) == 1
    assert ask(core) == 0


def test_restoring_that_is_slower_than_computing_is_not_done():
    core = fake_core(fake_config(swap_bytes=1 << 20))
    ask(core)
    evict_all(core)
    core.scheduler.cost.restore_s["swap"] = 1e9
    assert ask(core) == 0
    assert core.report()["blocks_restored"] == 0
    assert core.scheduler.cost.restore_s["swap"] < 1e9, "restoring would never be tried again"


def test_restoring_beside_a_stream_takes_several_steps(monkeypatch):
    core = make(swap_bytes=1 << 20, itl_target_ms=50, max_num_batched_tokens=64)
    long = list(range(120))
    ask(core, long)
    evict_all(core)
    slow_moves(core, 0.01, monkeypatch)
    restored = []
    core.scheduler.cost.restore_s["swap"] = 0.01
    tokens, held = {900: [], 901: []}, {}
    for number, prompt in ((900, [5, 6, 7]), (901, long)):
        sampling = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
        core.handle(AddRequest(number, array("i", prompt).tobytes(), sampling, 0.0))
        if number == 900:
            tokens[900] += core.step().outputs[0].tokens
    while core.has_work:
        before = core.kv.offload.num_restored
        for output in core.step().outputs:
            tokens[output.id] += output.tokens
            held[output.id] = output.held or held.get(output.id)
        restored.append(core.kv.offload.num_restored - before)
        assert core.check() == {"ok": True}
    assert sum(restored) == 29
    assert max(restored) < 29
    assert held[901].get("offload"), held
    assert tokens[900] == reference([5, 6, 7], SamplingParams(), 1, 60)
    assert tokens[901] == reference(long, SamplingParams(), 1, 60)


def test_a_request_that_found_what_a_failed_step_was_to_compute_starts_again():
    faults = [False]

    def fault(step, outputs):
        if faults[0]:
            faults[0] = False
            core.executor.model.kv = [[-7] * 4 for _ in core.executor.model.kv]
            msg = "no"
            raise RuntimeError(msg)

    core = fake_core(fake_config(swap_bytes=1 << 20, itl_target_ms=1000), fault=fault)
    core.scheduler.cost.restores = lambda *_: True
    ask(core)
    evict_all(core)
    asked = {
        800: ([5, 6, 7], SamplingParams(seed=1, max_tokens=50)),  # makes time count
        801: (PROMPT[:17], SamplingParams(seed=1, max_tokens=2, prompt_logprobs=0)),
        802: (PROMPT, SamplingParams(seed=1, max_tokens=6)),
    }
    for number, (prompt, sampling) in asked.items():
        core.handle(AddRequest(number, array("i", prompt).tobytes(), sampling, 0.0))
        if number == 800:
            core.step()
    # 802 finds the blocks that 801 is computing; the next ones are to be restored another time.
    core.scheduler.cost.restore_s["swap"] = 1e9
    faults[0] = True
    assert [(o.id, o.finish) for o in core.step().outputs] == [(800, "error"), (801, "error")]
    assert core.check() == {"ok": True}
    core.scheduler.cost.restore_s["swap"] = 0.0
    tokens = []
    while core.has_work:
        tokens += [token for output in core.step().outputs for token in output.tokens]
    assert tokens == reference(PROMPT, SamplingParams(), 1, 6)


@pytest.mark.parametrize(
    "change",
    [
        {"isa": "avx2"},
        {"dtype": "bfloat16"},
        {"kv_dtype": "bf16"},
        {"kv_dtype": "int8_v4"},
        {"quantize": "int8"},
    ],
)
def test_fingerprint_differs_where_keys_and_values_may(change):
    assert fingerprint(fake_config(), 64) != fingerprint(fake_config(**change), 64)
    assert fingerprint(fake_config(), 64) != fingerprint(fake_config(), 128)


def test_fingerprint_differs_between_versions(monkeypatch):
    before = fingerprint(fake_config(), 64)
    monkeypatch.setattr("cpuserve.engine.fingerprint.version", lambda: "0.1.0+g01234567")
    assert fingerprint(fake_config(), 64) != before


def test_fingerprint_follows_the_files_of_the_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    config = fake_config(model_path=str(tmp_path))
    before = fingerprint(config, 64)
    assert fingerprint(fake_config(model_path=str(tmp_path), max_model_len=50), 64) == before
    (tmp_path / "notes.txt").write_text("x")
    assert fingerprint(config, 64) == before
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert fingerprint(config, 64) != before


def slow_moves(core, seconds, monkeypatch):
    """From now on each move of a block takes `seconds`, on a clock that nothing else moves.

    Returns the clock, in place of the module `time`.

    By a real clock moves would take longer on a busy machine, and computing would win.
    """
    blocks, now = core.kv.offload.blocks, [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    monkeypatch.setattr("cpuserve.core.kv.offload.time", clock)

    def slow(move):
        def moved(*arguments):
            now[0] += seconds
            return move(*arguments)

        return moved

    blocks.write, blocks.read = slow(blocks.write), slow(blocks.read)
    return clock


def test_moving_blocks_is_no_part_of_the_cost_of_a_step(monkeypatch):
    """Otherwise the cost model would take later steps with as many tokens for long ones."""
    core = make(swap_bytes=1 << 20)
    ask(core)
    evict_all(core)
    clock = slow_moves(core, 0.01, monkeypatch)
    monkeypatch.setattr("cpuserve.engine.core.time", clock)
    busy_s = core.stats.busy_s
    assert ask(core) == 40
    assert core.kv.offload.num_restored > 0
    assert core.stats.busy_s == pytest.approx(busy_s)


def test_restoring_a_long_prompt_lets_messages_in_between(monkeypatch):
    core = make(swap_bytes=1 << 20, max_num_batched_tokens=256)
    long = list(range(120))
    ask(core, long)
    evict_all(core)
    slow_moves(core, 0.01, monkeypatch)
    sampling = SamplingParams(seed=1, max_tokens=6)
    core.handle(AddRequest(700, array("i", long).tobytes(), sampling, 0.0))
    core.handle(AddRequest(701, array("i", [1, 2, 3]).tobytes(), sampling, 0.0))
    for _ in range(3):
        (output,) = core.step().outputs
        assert output.id == 701, "a short request does not wait until a long one is restored"
        assert core.check() == {"ok": True}
    restored = core.kv.offload.num_restored
    assert 3 <= restored <= 12, "a step restored for longer than the time of three or four blocks"
    core.handle(Abort([700]))
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    assert {output.id for output in outputs} == {701}
    assert core.kv.offload.num_restored == restored
    assert ask(core, long) == 116


def test_room_that_takes_long_to_save_is_made_in_several_steps_and_nothing_is_lost(monkeypatch):
    core = make(swap_bytes=1 << 20, itl_target_ms=50, kv_blocks=40, max_num_batched_tokens=200)
    long, other = list(range(100)), list(range(100, 200))
    ask(core, long)
    slow_moves(core, 0.01, monkeypatch)
    tokens = {600: [], 601: []}
    for number, prompt in ((600, [5, 6, 7]), (601, other)):
        sampling = SamplingParams(seed=1, max_tokens=25, ignore_eos=True)
        core.handle(AddRequest(number, array("i", prompt).tobytes(), sampling, 0.0))
        if number == 600:
            for _ in range(4):
                core.scheduler.cost.observe(core.scheduler.work, 0.04)
                tokens[600] += core.step().outputs[0].tokens
    saved = []
    while core.has_work:
        before = core.kv.offload.num_saved
        for output in core.step().outputs:
            tokens[output.id] += output.tokens
        saved.append(core.kv.offload.num_saved - before)
        assert core.check() == {"ok": True}
    assert sum(saved) >= 10
    assert max(saved) <= 4, "too many blocks were saved in one step, which delays streams"
    for number, prompt in ((600, [5, 6, 7]), (601, other)):
        assert tokens[number] == reference(prompt, SamplingParams(), 1, 25)
    evict_all(core)
    assert ask(core, long) == 96, "a block was lost"


def test_a_step_that_has_no_time_left_evicts_without_saving():
    core = make(swap_bytes=1 << 20)
    ask(core)
    evict_all(core, left_s=0.0)
    assert core.report()["swap_blocks"] == 0
    assert ask(core) == 0


def test_blocks_are_not_copied_for_a_disk_that_takes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.engine.offload.PREFIX_CACHE_QUEUE_BYTES", 32)
    core = make(prefix_cache_dir=str(tmp_path))
    goes_on = threading.Event()
    monkeypatch.setattr(core.kv.offload.tiers[0], "_write", lambda *_: goes_on.wait(PATIENCE_S))
    ask(core)
    reads, read = [], core.kv.offload.blocks.read
    core.kv.offload.blocks.read = lambda *of: reads.append(of) or read(*of)
    evict_all(core)
    goes_on.set()
    assert 2 <= len(reads) <= 3
    assert core.kv.offload.num_saved == len(reads)


@pytest.mark.parametrize("place", [0.0, 0.01, 0.27, 0.5, 0.73, 0.99, 1.0])
@pytest.mark.parametrize("size", [5, 10 << 10, 600 << 10, 3 << 20])
def test_fingerprint_tells_models_apart_whose_files_have_one_size_and_time(tmp_path, size, place):
    """The files differ in a twentieth of the weights, like a fine-tune of a few layers."""
    prints = set()
    for name in "ab":
        weights = bytearray(size)
        if name == "b":
            part = -(-size // 20)
            begin = int(place * (size - part))
            weights[begin : begin + part] = b"1" * part
        (tmp_path / name).mkdir()
        file = tmp_path / name / "model.safetensors"
        file.write_bytes(weights)
        os.utime(file, (1, 1))
        prints.add(fingerprint(fake_config(model_path=str(tmp_path / name)), 64))
    assert len(prints) == 2
    again = fingerprint(fake_config(model_path=str(tmp_path / "b")), 64)
    assert again in prints
