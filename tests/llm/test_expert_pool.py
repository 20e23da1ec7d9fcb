"""Experts in a pool of limited memory: the same bits as in memory, and what a failed read costs."""

import ctypes
import dataclasses
import errno
import mmap
import os
import shutil
import sys
import threading
import time
from array import array

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from cpuserve import _C, LLM, SamplingParams
from cpuserve.base import fault_points
from cpuserve.base.errors import StartupError
from cpuserve.engine.build import build_engine, run_engine
from cpuserve.engine.core import EngineCore
from cpuserve.engine.ipc import AddRequest
from cpuserve.loader import packed_files
from cpuserve.program.operations.mixture import Guess, with_guesses
from cpuserve.runtime import expert_memory, native, packed_cache
from tests.helpers.answers import exact_answers
from tests.helpers.gguf_blocks import RECIPE, write_model
from tests.helpers.patience import wait_until
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(5 + 20 * n)] for n in range(3)]
PARAMS = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
MADV_PAGEOUT = 21  # of Linux 5.4; Python has no name for it
ALL = "64MiB"  # more than all weights of the models of these tests


pytestmark = pytest.mark.usefixtures("folder")


def make(family="qwen3-moe", **options):
    path = tiny_model(family, dtype="bfloat16")
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLM(str(path), executor="native", **{**sizes, **options})


def answers(llm):
    return exact_answers(llm, PROMPTS, PARAMS)


def with_engine(config, use):
    """Return use(core) of an engine with this configuration."""
    results = []

    def main(team):
        core = build_engine(config, team=team)
        try:
            results.append(use(core))
        finally:
            core.close()

    run_engine(config, main)
    return results[0]


def config_of(family="qwen3-moe", **options):
    """Return the configuration of a pool with all experts, and the bytes of its parts."""
    with make(family, weights_on_disk=ALL, **options) as llm:
        config = llm.config
    return config, with_engine(config, parts)


def parts(core):
    executor = core.executor
    others, experts, least = _C.pooled_bytes(executor.team, executor.lowered.native)
    sizes = {"others": others, "experts": experts, "least": least}
    return {**executor.native.expert_counts, **sizes}


def of_experts(config, sizes, share):
    """Return `config` with a pool for this share of the experts, but at least one of each kind."""
    pool = max(sizes["least"], int(share * sizes["bytes"]))
    return replace(config, weight_memory_bytes=sizes["others"] + pool)


def add(core, number, prompt, **params):
    sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0, **params})
    core.handle(AddRequest(number, array("i", prompt).tobytes(), sampling, 0.0))


def run(core):
    """Run until all requests have ended; return {number: (tokens, error)}."""
    found = {}
    while core.has_work:
        for output in core.step().outputs:
            tokens, error = found.get(output.id, ([], None))
            found[output.id] = (tokens + output.tokens, output.error or error)
    assert core.check() == {"ok": True}
    assert core.kv.num_free == core.kv.num_blocks
    return found


def all_prompts(core):
    for number, prompt in enumerate(PROMPTS):
        add(core, number, prompt)
    return run(core)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen3-moe", None),
        ("gpt-oss", None),
        *(
            pytest.param(family, scheme, marks=pytest.mark.deep)
            for family, scheme in [
                ("qwen3-moe", "int8"),
                ("qwen3-moe", "w8a8"),
                ("qwen3-moe", "int4"),
                ("qwen3-moe", "int4_mixed"),
                ("gpt-oss", "int4"),
                ("deepseek-v3", None),
                ("mixtral", "int8"),
            ]
        ),
    ],
)
@pytest.mark.parametrize(
    ("threads", "ranks"),
    [(2, 1), *(pytest.param(*n, marks=pytest.mark.deep) for n in [(1, 1), (3, 1), (2, 2)])],
)
def test_pools_of_all_sizes_give_the_same_bits(family, scheme, threads, ranks, counts_at_end):
    options = {"quantization": scheme, "tensor_parallel_size": ranks}
    options |= {"omp_num_threads": threads, "omp_threads_bind": "nobind"}
    with make(family, weight_cache_size="0", **options) as llm:
        expected = answers(llm)
    with make(family, weights_on_disk=ALL, **options) as llm:
        assert answers(llm) == expected
        config = llm.config
    sizes = counts_at_end[-1]
    assert sizes["slots"] == sizes["units"]
    for share in (0.1, 0.2, 0.5):
        size = of_experts(config, sizes, share).weight_memory_bytes
        with make(family, weights_on_disk=f"{size / 1024:.2f}KiB", **options) as llm:
            assert answers(llm) == expected
        counts = counts_at_end[-1]
        assert counts["slots"] < sizes["slots"]
        assert counts["misses"] > 0
        assert counts["bytes"] <= size


def test_pools_of_a_gguf_file_with_many_types_give_the_same_bits(tmp_path, counts_at_end):
    path = tmp_path / "model.gguf"
    write_model(path, RECIPE, experts=8, vocab=320, tokenizer=True)

    def answers_of(**options):
        with LLM(str(path), max_model_len=256, max_num_batched_tokens=64, **options) as llm:
            return answers(llm)

    expected = answers_of(weight_cache_size="0")
    assert answers_of(weights_on_disk=ALL) == expected
    sizes = counts_at_end[-1]
    assert sizes["slots"] == sizes["units"]
    size = sizes["others"] + max(sizes["least"], sizes["bytes"] // 5)
    assert answers_of(weights_on_disk=f"{size / 1024:.2f}KiB") == expected
    assert counts_at_end[-1]["slots"] < sizes["slots"]


@pytest.fixture
def counts_at_end(monkeypatch):
    """The `parts` of each engine that has ended in this test."""
    counts, close = [], EngineCore.close

    def counted(core):
        counts.append(parts(core))
        close(core)

    monkeypatch.setattr(EngineCore, "close", counted)
    return counts


def test_waves_read_each_matrix_once_for_a_prompt_that_uses_more_than_fits():
    config, sizes = config_of()
    expected = with_engine(config, all_prompts)

    def use(core):
        assert all_prompts(core) == expected
        before = parts(core)
        add(core, 9, PROMPTS[2], max_tokens=1)
        run(core)
        after = parts(core)
        # One chunk needs each matrix of a layer at most once.
        assert after["misses"] - before["misses"] <= sizes["units"]
        return after

    found = with_engine(of_experts(config, sizes, 0), use)
    assert found["slots"] < found["units"] // 4


# A read that fails before a thread waits for it may be repeated in the same step, as another part
# of the step needs it too, and then costs nothing. So a request may end only in one of some tries.
TRIES = 20


class Failing:
    """A hook of fault points: from step `first` on, reads of experts fail `count` times."""

    def __init__(self, first, count, number=errno.EIO):
        self.first, self.left, self.number = first, count, number

    def __call__(self, point, size):
        if point == "engine.step":
            self.first -= 1
        if point == "expert.read" and self.first <= 0 and self.left > 0:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return size


def test_a_read_error_ends_the_requests_that_need_the_expert_and_no_others(folder, monkeypatch):
    # What is read early, for a warm start or a guess, may fail: it is read again when it is needed.
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.4)
    expected = with_engine(config, all_prompts)
    assert all(error is None for _, error in expected.values())
    ended = 0
    for first in range(3, 9):
        hook = Failing(first, 1)
        monkeypatch.setattr(fault_points, "_hook", hook)
        remove_heat(folder)
        found, again, errors = with_engine(config, twice_and_errors)
        assert again == expected  # nothing of the failed step has stayed in the prefix cache
        assert errors == 1 - hook.left
        for number, (tokens, error) in found.items():
            if error is None:
                assert tokens == expected[number][0]
                continue
            assert error == "the model's weights cannot be read from the disk: Input/output error"
            assert tokens == expected[number][0][: len(tokens)]
            ended += 1
        # A read that was repeated before a step needed it has cost nothing.
        assert hook.left or any(error for _, error in found.values()) or found == expected
    assert 0 < ended < 6 * len(PROMPTS)


def twice_and_errors(core):
    return all_prompts(core), all_prompts(core), core.stats.expert_errors


def test_a_prompt_that_shares_blocks_with_a_failed_one_is_computed_again(folder, monkeypatch):
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    config, sizes = config_of()
    config = of_experts(config, sizes, 0)
    prompts = [PROMPTS[2] + [number + 5] for number in range(3)]

    def use(core):
        for number, prompt in enumerate(prompts):
            add(core, number, prompt)
        return run(core)

    expected = with_engine(config, use)
    for _ in range(TRIES):
        remove_heat(folder)  # a read of a warm start that fails costs nothing
        monkeypatch.setattr(fault_points, "_hook", Failing(1, 1))
        for tokens, error in (found := with_engine(config, use)).values():
            assert error or tokens in [tokens for tokens, _ in expected.values()]
        if any(error for _, error in found.values()):
            return
    pytest.fail("no request has ended")


@pytest.mark.parametrize("change", ["byte", "cut"])
def test_a_file_that_changes_or_ends_is_never_computed_with(folder, change):
    config, sizes = config_of()

    def use(core):
        expected = all_prompts(core)
        (file,) = folder.glob("*.weights")
        with file.open("r+b") as stream:
            if change == "cut":
                stream.truncate(packed_files.HEADER_BYTES)
            else:
                content = bytearray(file.read_bytes())
                for at in range(packed_files.HEADER_BYTES, len(content), 64):
                    content[at] ^= 16
                stream.write(content)
        found = all_prompts(core)
        why = "file has changed" if change == "byte" else "Input/output error"
        for number, (tokens, error) in found.items():
            assert why in error
            assert tokens == expected[number][0][: len(tokens)]

    with_engine(of_experts(config, sizes, 0), use)


def without_layers(folder):
    """Return a mixture of four layers that add nothing to the stream."""
    path = folder / "still"
    shutil.copytree(tiny_model("qwen3-moe", num_hidden_layers=4), path)
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        for name, values in weights.items():
            if "o_proj" in name or "down_proj" in name:
                values[...] = 0
        save_file(weights, file)
    return path


class Slow:
    """A hook of fault points: reads of experts take so long, and are counted."""

    def __init__(self, seconds):
        self.seconds, self.reads = seconds, 0

    def __call__(self, point, size):
        if point == "expert.read":
            self.reads += 1
            time.sleep(self.seconds)
        return size


def decode_until_guesses(core):
    """Return the answers of the last of many rounds, and the counts; a guess was made in one.

    A guess is made if a reader is idle between two layers, which need not be so in one round.
    """
    for _ in range(50):
        found, counts = all_prompts(core), parts(core)
        if counts["guessed"]:
            break
    return found, counts


def test_experts_are_read_before_their_router_chooses_them(tmp_path, monkeypatch):
    path = without_layers(tmp_path)
    sizes = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    with LLM(str(path), executor="native", weights_on_disk=ALL, **sizes) as llm:
        config = llm.config
    all_sizes, expected = with_engine(config, lambda core: (parts(core), all_prompts(core)))
    # While the slow reads of a layer go on, idle readers read what the next layer may need.
    monkeypatch.setattr(fault_points, "_hook", Slow(0.01))
    small = of_experts(config, all_sizes, 0.4)
    found, counts = with_engine(small, decode_until_guesses)
    assert found == expected
    # The stream does not change between the routers, so each guess is right.
    assert counts["guessed_right"] == counts["guessed"] > 0


def with_worst_guesses(program):
    """Return the program with guesses of the experts that the next router likes least."""
    ops = [*with_guesses(program).ops]
    for i, op in enumerate(ops):
        if isinstance(op, Guess):
            name = ops[i - 1].weight.replace("post_attention", "input")
            ops[i - 1] = replace(ops[i - 1], weight=name)
    return dataclasses.replace(with_guesses(program), ops=tuple(ops))


def test_wrong_guesses_stop(tmp_path, monkeypatch):
    path = without_layers(tmp_path)
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        for name in weights:
            if "post_attention_layernorm" in name:
                weights[name.replace("post_attention", "input")] = -weights[name]
        save_file(weights, file)
    monkeypatch.setattr(native, "with_guesses", with_worst_guesses)
    sizes = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    with LLM(str(path), executor="native", weights_on_disk=ALL, **sizes) as llm:
        config = llm.config
    all_sizes, expected = with_engine(config, lambda core: (parts(core), all_prompts(core)))
    monkeypatch.setattr(fault_points, "_hook", Slow(0.002))

    def use(core):
        """Return the counts after the 64 guesses of a trial, and after five more rounds."""
        for _ in range(60):
            assert all_prompts(core) == expected
            if parts(core)["guessed"] >= 64:
                break
        trial = parts(core)
        for _ in range(5):
            assert all_prompts(core) == expected
        return trial, parts(core)

    trial, later = with_engine(of_experts(config, all_sizes, 0.4), use)
    assert 64 <= trial["guessed"] == later["guessed"] < 80
    assert later["guessed_right"] == 0


def test_steps_of_one_token_guess_only_where_experts_may_be_missing(tmp_path, monkeypatch):
    """One thread runs most operations of such a step, and must leave out those of guesses, too."""
    path = without_layers(tmp_path)
    sizes = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    with LLM(str(path), executor="native", weights_on_disk=ALL, **sizes) as llm:
        config = llm.config
    all_sizes = with_engine(config, parts)
    monkeypatch.setattr(fault_points, "_hook", Slow(0.01))

    def use(core):
        for number in range(5):
            add(core, number, [5 + 60 * number], max_tokens=3)
            run(core)
        return parts(core)

    counts = with_engine(config, use)
    assert counts["slots"] == counts["units"]
    assert counts["misses"] > 0  # as when experts are read that were guessed
    assert counts["guessed"] == 0
    remove_heat(tmp_path)
    assert with_engine(of_experts(config, all_sizes, 0.9), use)["guessed"] > 0


def remove_heat(folder):
    """Forget which experts were used, so that the next start loads none of them."""
    for heat in folder.rglob("*.heat"):
        heat.unlink()


# With these shares of its experts in the pool, each family guesses in the first rounds.
@pytest.mark.parametrize(
    ("family", "share"), [("gpt-oss", 0.3), ("qwen3-next", 0.4), ("deepseek-v3", 0.3)]
)
def test_guesses_change_no_bit(family, share, monkeypatch):
    config, sizes = config_of(family)
    expected = with_engine(config, all_prompts)
    monkeypatch.setattr(fault_points, "_hook", Slow(0.002))
    found, counts = with_engine(of_experts(config, sizes, share), decode_until_guesses)
    assert found == expected
    assert counts["guessed_right"] <= counts["guessed"]
    monkeypatch.setattr(fault_points, "_hook", Slow(0))
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    found, counts = with_engine(
        of_experts(config, sizes, share), lambda core: (all_prompts(core), parts(core))
    )
    assert found == expected
    assert counts["guessed"] == 0


@pytest.mark.parametrize("chunk", [1024, 256])
def test_a_prompt_of_1024_tokens_reads_no_expert_twice_in_a_chunk(folder, chunk, monkeypatch):
    path = tiny_model("qwen3-moe", dtype="bfloat16", max_position_embeddings=2048)
    sizes = {"max_model_len": 1100, "max_num_seqs": 2, "max_num_batched_tokens": chunk}
    with LLM(str(path), executor="native", weights_on_disk=ALL, **sizes) as llm:
        config = llm.config
    prompt = [(7 * i + i * i) % 500 + 5 for i in range(1024)]
    hook = Slow(0)
    monkeypatch.setattr(fault_points, "_hook", hook)

    def use(core):
        """Return the token, the reads of each step (each unit is less than a piece), the counts."""
        add(core, 1, prompt, max_tokens=1)
        tokens, reads = [], []
        while core.has_work:
            before = hook.reads
            for output in core.step().outputs:
                tokens += output.tokens
            reads.append(hook.reads - before)
        return tokens, reads, parts(core)

    expected, _, sizes = with_engine(config, use)
    remove_heat(folder)  # reads of a warm start that still go on in the first step are misses
    found, reads, counts = with_engine(of_experts(config, sizes, 0), use)
    assert found == expected
    assert counts["slots"] < counts["units"] // 4  # each layer works in waves
    assert len(reads) == 1024 // chunk
    assert sum(reads) == counts["misses"] > 0
    assert max(reads) <= counts["units"]


@pytest.mark.parametrize("kind", ["short", "slow"])
def test_short_and_slow_reads_change_no_bit(monkeypatch, kind):
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.2)
    expected = with_engine(config, all_prompts)
    changed = []

    def hook(point, size):
        if point != "expert.read" or len(changed) == 20:
            return size
        changed.append(size)
        if kind == "slow":
            time.sleep(0.02)
            return size
        return size // 2 // 4096 * 4096 or size

    monkeypatch.setattr(fault_points, "_hook", hook)
    assert with_engine(config, all_prompts) == expected
    assert len(changed) == 20


class SlowDisk:
    """A hook of fault points: all reads of experts together get 50 MB/s."""

    def __init__(self):
        self.lock, self.bytes = threading.Lock(), 0

    def __call__(self, point, size):
        if point == "expert.read":
            with self.lock:
                self.bytes += size
                time.sleep(size / 50e6)
        return size


def test_a_disk_of_50_mb_a_second_ends_no_request_and_changes_no_bit(monkeypatch):
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.3)
    expected = with_engine(config, all_prompts)
    assert all(error is None for _, error in expected.values())
    disk = SlowDisk()
    monkeypatch.setattr(fault_points, "_hook", disk)
    assert with_engine(config, all_prompts) == expected
    assert disk.bytes > sizes["bytes"]


def cached_pages(file):
    """The number of pages of a file that the page cache holds."""
    size = file.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE) as view:
        at = ctypes.addressof(first := ctypes.c_char.from_buffer(view))
        code = ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), found)
        del first
    assert code == 0
    return sum(page & 1 for page in found)


def reads_past_the_page_cache(file):
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="mincore and O_DIRECT of Linux")
def test_experts_do_not_fill_the_page_cache(folder):
    # The default threads: the kernel reads ahead of what one thread alone reads of this small file,
    # so 184 of its pages come in instead of 58, and nobody asked for them.
    config, sizes = config_of(omp_threads_bind="auto")
    expected = with_engine(config, all_prompts)
    (file,) = folder.glob("*.weights")
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = cached_pages(file)

    def use(core):
        found = all_prompts(core)
        return found, parts(core)["bytes_read"]

    found, read = with_engine(of_experts(config, sizes, 0.2), use)
    assert found == expected
    assert read > sizes["bytes"]
    if reads_past_the_page_cache(file):
        others = -(-sizes["others"] // mmap.PAGESIZE) + 64  # what every token reads, and headers
        assert cached_pages(file) - before <= others


def push_out(core, file):
    """Take the pages of a file from the page cache, and from this process, as under pressure.

    Return how many are left: each CPU first adds some new pages to the lists of the system.
    """
    for arena in core.executor.native.packed_arenas:
        at, end = arena.ctypes.data, arena.ctypes.data + arena.nbytes
        at, end = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(max(0, end - at))
        assert ctypes.CDLL(None).madvise(ctypes.c_void_p(at), size, MADV_PAGEOUT) == 0
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_pages(file)


@pytest.mark.skipif(sys.platform != "linux", reason="the page cache of Linux")
@pytest.mark.parametrize("place", ["pool", "mapped"])
def test_a_page_cache_that_others_fill_costs_reads_and_no_bit(folder, monkeypatch, place):
    config, sizes = config_of()
    expected = with_engine(config, all_prompts)
    if place == "mapped":
        with make(weights_on_disk="always") as llm:
            config = llm.config
    else:
        config = of_experts(config, sizes, 0.3)
    (file,) = folder.glob("*.weights")
    all_pages, step = file.stat().st_size // mmap.PAGESIZE, EngineCore.step

    def pressed(core):
        wait_until(lambda: push_out(core, file) < all_pages / 4, "pages stay in memory")
        return step(core)

    def use(core):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        monkeypatch.setattr(EngineCore, "step", pressed)
        return all_prompts(core)

    assert with_engine(config, use) == expected


def test_a_later_start_loads_the_experts_that_were_used_most(folder):
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.5)
    with_engine(config, all_prompts)
    (file,) = folder.glob("*.heat")
    heat = np.frombuffer(file.read_bytes(), np.float32)
    assert heat.size == sizes["units"]

    def use(core):
        assert np.allclose(core.executor.native.expert_heat, heat, rtol=1e-4)
        counts = parts(core)
        while counts["bytes_read"] == 0:  # the readers load experts before the first request
            counts = parts(core)
        return counts

    assert with_engine(config, use)["misses"] == 0
    file.write_bytes(b"damaged")
    with_engine(config, all_prompts)
    assert np.frombuffer(file.read_bytes(), np.float32).size == sizes["units"]


def test_a_cancelled_step_leaves_the_pool_usable():
    config, sizes = config_of()

    def use(core):
        expected = all_prompts(core)
        for number, prompt in enumerate(PROMPTS):
            add(core, number, prompt)
        core.executor.cancel()
        try:
            core.step()
        finally:
            core.executor.cancel(False)
        run(core)
        assert all_prompts(core) == expected

    with_engine(of_experts(config, sizes, 0), use)


def test_too_little_memory_is_refused_with_what_is_enough():
    config, sizes = config_of()
    others = sizes["others"]
    with pytest.raises(StartupError, match=r"one expert needs .*; give at least"):
        with_engine(replace(config, weight_memory_bytes=others + 64), parts)
    with pytest.raises(StartupError, match="mixture of experts"):
        make("llama", weights_on_disk="1")


def test_the_heat_says_which_share_of_uses_misses(tmp_path):
    heat = expert_memory.ExpertHeat(tmp_path / "x.heat")
    assert heat.missed(0.5) is None
    heat.write(np.array([6, 1, 2, 1], np.float32))
    assert heat.missed(0.25) == pytest.approx(0.4)
    assert heat.missed(1.0) == pytest.approx(0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_the_rate_of_the_disk_is_measured_into_memory_as_a_pool_has(tmp_path, monkeypatch):
    """Into pages of 4 KiB a disk of 3.8 GB/s gives 1.5."""
    asked = []

    class Memory(mmap.mmap):
        def madvise(self, option):
            asked.append((option, len(self)))
            super().madvise(option)

    monkeypatch.setattr(packed_cache.mmap, "mmap", Memory)
    file = tmp_path / "x.weights"
    file.write_bytes(bytes(3 << 20))
    assert packed_cache.disk_rate(file, 1 << 20) > 0
    assert asked == [(mmap.MADV_HUGEPAGE, 3 << 20)] * packed_cache.PROBE_THREADS
    memory = np.frombuffer(packed_cache._memory_to_read_into(1 << 20), np.uint8)
    assert memory.size == 1 << 20
    assert memory.ctypes.data % (2 << 20) == 0
