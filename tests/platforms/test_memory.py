"""Size of the KV cache: its memory bounds, and the options that set it."""

import dataclasses
import re

import msgspec
import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.config.load import load_options
from cpuserve.platforms.base import KvLayerFacts, TowerFacts
from cpuserve.platforms.cache_groups import block_bytes, group_layers
from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.host import Node
from cpuserve.platforms.memory import anonymous_weight_bytes, count_bytes
from cpuserve.platforms.speculation import logit_bytes, rope_bytes
from tests.helpers.hosts import GIB, LLAMA_1B, SMOLLM2, got, load_host, resolve, why

MIB = 1 << 20
MASKS = 8  # bitmasks of a sequence: for the next token, and after each of 7 draft tokens
TOKEN = 2 * 30 * 3 * 64 * 2  # bytes of a SmolLM2 token: K and V, layers, heads, dims, bf16


def machine(name="vm_2core_zen5", **changes):
    return msgspec.structs.replace(load_host(name), **changes)


def from_environment(text, host):
    asked = load_options({}, environ={"CPUSERVE_KVCACHE_SPACE": text})
    return resolve(host, sources=asked.sources, kv_cache_space=asked.options.kv_cache_space)


def kv_bytes(resolved):
    return resolved.config.kv_blocks * resolved.config.block_size * TOKEN


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.25", GIB // 4), ("30%", 24 * GIB * 3 // 10), ("2", 2 * GIB)],
)
def test_the_variable_sizes_the_cache_to_the_block(text, size):
    assert size - 32 * TOKEN < kv_bytes(from_environment(text, machine())) <= size


@pytest.mark.parametrize("text", ["0", "0%"])
def test_zero_gives_a_quarter_of_what_is_free(text):
    resolved = from_environment(text, machine())
    assert kv_bytes(resolved) == kv_bytes(resolve(machine()))
    assert kv_bytes(resolved) == pytest.approx(20.13 * GIB / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("1000", ("1000.00 GiB does not fit", "of the machine is free", "give at most 20.12")),
        ("99%", ("does not fit", "give at most 20.12")),
        ("abc", ("give GiB (4 or 0.5)", "30%", "0 for automatic")),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_one_line_with_a_remedy(text, needles):
    with pytest.raises(ConfigError) as error:
        from_environment(text, machine())
    for needle in ("CPUSERVE_KVCACHE_SPACE", text, *needles):
        assert needle in str(error.value)
    assert "\n" not in str(error.value)


def test_slots_of_adapters_are_paid_for_before_the_cache():
    def free(facts, **options):
        with pytest.raises(ConfigError) as error:
            resolve(machine(), facts, kv_cache_space="1000", **options)
        return float(re.search(r"([\d.]+) GiB of the machine is free", str(error.value))[1])

    slots = {"adapter_slots": 5, "adapter_rank": 16, "adapter_weights": 500_000_000}
    facts = dataclasses.replace(LLAMA_1B, **slots)
    asked = {"allow_runtime_lora_updating": True}
    # bf16, and the fp32 file of one of them.
    taken = (500_000_000 * 2 + 500_000_000 // 5 * 4) / GIB
    assert free(LLAMA_1B) - free(facts, **asked) == pytest.approx(taken, abs=0.015)
    resolved = resolve(machine(), facts, **asked)
    assert (got(resolved, "max_loras"), got(resolved, "max_lora_rank")) == (4, 16)
    assert "1.30 GiB" in why(resolved, "max_loras")
    assert (resolved.config.adapter_slots, resolved.config.adapter_rank) == (5, 16)


def free_for_cache(facts, **options):
    """GiB that a refusal names as free next to the weights."""
    with pytest.raises(ConfigError) as error:
        resolve(machine(), facts, kv_cache_space="1000", **options)
    return float(re.search(r"([\d.]+) GiB of the machine is free", str(error.value))[1])


def test_tables_that_are_looked_up_in_their_files_are_page_cache():
    table = LLAMA_1B.weight_bytes // 2
    facts = dataclasses.replace(LLAMA_1B, table_bytes=table)
    more = free_for_cache(facts) - free_for_cache(LLAMA_1B)
    assert more == pytest.approx(table / GIB, abs=0.015)
    wide = free_for_cache(facts, dtype="float32") - free_for_cache(LLAMA_1B, dtype="float32")
    assert wide == pytest.approx(2 * table / GIB, abs=0.015)


def test_tables_are_in_memory_where_torch_reads_them():
    facts = dataclasses.replace(LLAMA_1B, table_bytes=LLAMA_1B.weight_bytes // 2)
    assert anonymous_weight_bytes(facts, "bfloat16", "none", "torch") == facts.weight_bytes
    assert (
        anonymous_weight_bytes(facts, "bfloat16", "none") == facts.weight_bytes - facts.table_bytes
    )


def test_rope_tables_are_paid_for_before_the_cache():
    facts = dataclasses.replace(LLAMA_1B, rope_columns=64 * 100)
    length = facts.max_position
    taken = free_for_cache(LLAMA_1B) - free_for_cache(facts)
    assert taken == pytest.approx(64 * 100 * length * 4 / GIB, abs=0.015)
    shorter = free_for_cache(LLAMA_1B) - free_for_cache(facts, max_model_len=length // 4)
    assert shorter == pytest.approx(taken / 4, abs=0.015)


def test_rows_and_patches_of_pictures_are_paid_for_before_the_cache():
    tower = TowerFacts(1 << 12, 1 << 27, 64, 1088, 17, 10**12)
    facts = dataclasses.replace(LLAMA_1B, tower=tower)
    taken = free_for_cache(LLAMA_1B) - free_for_cache(facts)
    patches = 128 << 20  # the front end keeps them until the engine asks
    assert taken == pytest.approx((16384 * (1 << 12) + (1 << 27) + patches) / GIB, abs=0.015)


def test_counts_of_penalties_are_paid_for_before_the_cache():
    facts = dataclasses.replace(LLAMA_1B, vocab=128_256)
    taken = free_for_cache(LLAMA_1B, max_num_seqs=512) - free_for_cache(facts, max_num_seqs=512)
    seen = min(128_256, facts.max_position)
    counts = 512 * (4 * 128_256 + 12 * seen) + 512 * MASKS * 128_256 / 8
    assert taken == pytest.approx((counts + logit_bytes(facts, 512)) / GIB, abs=0.015)


@pytest.mark.parametrize(("seqs", "rows"), [(1, 32), (32, 32), (64, 64), (128, 128), (512, 128)])
def test_logits_of_a_step_are_paid_for_before_the_cache(seqs, rows):
    facts = dataclasses.replace(LLAMA_1B, vocab=1_000_000)
    asked = {"max_num_seqs": seqs, "max_model_len": 256}
    taken = free_for_cache(LLAMA_1B, **asked) - free_for_cache(facts, **asked)
    counts = seqs * (4 * 1_000_000 + 12 * 256 + MASKS * 1_000_000 / 8)
    assert taken == pytest.approx((counts + rows * 4 * 1_000_000) / GIB, abs=0.015)


@pytest.mark.parametrize("seqs", [4, 512])
def test_indexes_of_draft_tokens_are_paid_for_before_the_cache(seqs):
    asked = {"max_num_seqs": seqs, "max_model_len": 65536}
    drafting = {**asked, "speculative_config": {"method": "ngram"}}
    plain = free_for_cache(LLAMA_1B, **asked, speculate="off")
    taken = plain - free_for_cache(LLAMA_1B, **drafting)
    rows = max(32, min(seqs, 128)), max(32, min(6 * seqs, 128))  # 5 draft tokens
    taken -= (rows[1] - rows[0]) * LLAMA_1B.vocab * 4 / GIB
    taken -= 5 * seqs * LLAMA_1B.vocab / 8 / GIB  # a bitmask for each draft token
    # three sizes of n-grams: entries of 4 bytes, of which 5 in 8 are in use, and 4 bytes of text
    assert taken == pytest.approx(min(seqs * 65536 * 48, 64 * MIB) / GIB, abs=0.015)
    assert taken > 0.005


@pytest.mark.parametrize(("seqs", "rows"), [(1, 32), (8, 48), (64, 128)])
def test_logits_of_draft_tokens_are_paid_for_before_the_cache(seqs, rows):
    facts = dataclasses.replace(LLAMA_1B, vocab=1_000_000)
    config = {"method": "ngram", "num_speculative_tokens": 5}
    asked = {"max_num_seqs": seqs, "max_model_len": 256, "speculative_config": config}
    taken = free_for_cache(LLAMA_1B, **asked) - free_for_cache(facts, **asked)
    counts = seqs * (4 * 1_000_000 + 12 * 256 + 6 * 1_000_000 / 8)
    assert taken == pytest.approx((counts + rows * 4 * 1_000_000) / GIB, abs=0.015)


def test_guesses_by_default_take_little_memory():
    asked = {"max_num_seqs": 512, "max_model_len": 65536}
    plain = free_for_cache(LLAMA_1B, **asked, speculate="off")
    masks = 7 * 512 * LLAMA_1B.vocab / 8
    taken = plain - free_for_cache(LLAMA_1B, **asked)
    assert taken == pytest.approx((4 * MIB + masks) / GIB, abs=0.01)


def test_bitmasks_of_grammars_are_paid_for_before_the_cache():
    facts = dataclasses.replace(LLAMA_1B, vocab=1_000_000)
    asked = {"max_num_seqs": 512, "max_model_len": 256}
    off, auto = (free_for_cache(facts, **asked, speculate=s) for s in ("off", "auto"))
    assert off - auto == pytest.approx((7 * 512 * 1_000_000 / 8 + 4 * MIB) / GIB, abs=0.015)


def test_counts_of_penalties_leave_the_smallest_cache_on_a_small_machine():
    """They take at most a quarter of what the smallest cache leaves."""
    facts = dataclasses.replace(SMOLLM2, vocab=200_000)
    small = machine(memory_available=GIB * 5 // 8)
    assert count_bytes(facts, 256, facts.max_position) > small.memory_available // 4
    few = kv_bytes(resolve(small, facts, max_num_seqs=256))
    assert 0 < few < kv_bytes(resolve(small, SMOLLM2, max_num_seqs=256))


def test_tables_for_more_tokens_than_fit_do_not_stop_a_start():
    """A table ends with the longest request, and that is shorter on a small machine."""
    facts = dataclasses.replace(SMOLLM2, rope_columns=64, max_position=50_000_000)
    small = machine(memory_available=GIB)
    assert rope_bytes(facts, facts.max_position) > small.memory_available
    assert got(resolve(small, facts), "max_model_len") >= 256


def test_room_for_adapters_has_no_effect_unless_they_may_change():
    resolved = resolve("vm_2core_zen5", max_loras=3)
    assert got(resolved, "max_loras") == "no effect"
    assert "--allow-runtime-lora-updating" in why(resolved, "max_loras")
    assert resolved.config.adapter_slots == 0


def test_the_size_is_explained_with_this_models_numbers():
    resolved = resolve("vm_2core_zen5")
    text = why(resolved, "kv_blocks")
    assert "234496 tokens at 22.50 KiB a token (2 x 30 layers x 3 heads x 64 x 2 bytes)" in text
    assert "full-length requests that fit: 28" in text
    assert "set CPUSERVE_KVCACHE_SPACE for more, 20.12 at most" in why(resolved, "kv_cache_space")


def test_layers_that_differ_are_added_up_and_heads_are_padded():
    layers = (KvLayerFacts(8, 128),) * 4 + (KvLayerFacts(2, 72),) * 2
    facts = dataclasses.replace(LLAMA_1B, kv_layers=layers)
    resolved = resolve("vm_2core_zen5", facts, kv_cache_space="4")
    formula = "2 x (4 layers x 8 heads x 128 + 2 layers x 2 heads x 80) x 2 bytes"
    assert formula in why(resolved, "kv_blocks")
    token = 2 * (4 * 8 * 128 + 2 * 2 * 80) * 2
    assert got(resolved, "kv_blocks") == 4 * GIB // (32 * token)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"memory_available": 3 * GIB}, "of the machine"),
        ({"cgroup": Cgroup(version=2, memory_limit=4 * GIB, memory_available=3 * GIB)}, "cgroup"),
        ({"data_limit": 3 * GIB}, "ulimit -d"),
        ({"address_space_limit": 3 * GIB}, "ulimit -v"),
    ],
)
def test_the_least_of_all_bounds_counts_and_is_named(changes, what):
    host = machine(**changes)
    automatic = resolve(host)
    assert kv_bytes(automatic) < 0.7 * GIB
    assert kv_bytes(resolve(machine())) > 3.9 * GIB
    with pytest.raises(ConfigError, match="does not fit") as error:
        resolve(host, kv_cache_space="3")
    assert what in str(error.value)


def test_an_address_space_limit_counts_the_mapped_file_too():
    def most(**changes):
        with pytest.raises(ConfigError) as error:
            resolve(machine(**changes), LLAMA_1B, kv_cache_space="1000")
        return float(str(error.value).split("at most ")[1].split(",")[0])

    lost = most(data_limit=8 * GIB) - most(address_space_limit=8 * GIB)
    assert lost * GIB > LLAMA_1B.weight_bytes


def two_nodes(free_0, free_1, **changes):
    nodes = (Node(0, 256 * GIB, free_0), Node(1, 256 * GIB, free_1))
    return machine("xeon_2s_amx", nodes=nodes, memory_available=free_0 + free_1, **changes)


def test_nodes_a_cpuset_forbids_do_not_count():
    host = two_nodes(3 * GIB, 200 * GIB, memory_nodes=(0,))
    with pytest.raises(ConfigError, match=r"on the NUMA nodes allowed .*give at most 2\.4"):
        resolve(host, kv_cache_space="20")
    free = msgspec.structs.replace(host, memory_nodes=(0, 1))
    assert kv_bytes(resolve(free, kv_cache_space="20")) > 19 * GIB


def test_the_automatic_size_stays_on_the_nodes_that_compute():
    host = two_nodes(3 * GIB, 200 * GIB)
    assert kv_bytes(resolve(host)) > 3.9 * GIB
    near = resolve(host, omp_threads_bind="0-31")
    assert kv_bytes(near) < 0.7 * GIB
    assert "the NUMA nodes in use" in why(near, "kv_cache_space")
    # a size that was set explicitly may use other nodes, too
    asked = resolve(host, omp_threads_bind="0-31", kv_cache_space="20")
    assert kv_bytes(asked) > 19 * GIB


@pytest.mark.parametrize("available", [430, 460, 500, 600, 1024, 2048])
def test_little_memory_gives_a_small_pool_and_no_refusal(available):
    limit = Cgroup(version=1, memory_limit=available * MIB, memory_available=available * MIB)
    resolved = resolve(machine(cgroup=limit))
    assert resolved.config.max_model_len >= 256
    needed = 98_000_000 + 256 * MIB + 2048 * 6000 * 4 + kv_bytes(resolved)
    assert needed <= 0.95 * available * MIB


def test_too_little_memory_names_what_would_do():
    def inside(mib):
        limit = Cgroup(version=1, memory_limit=mib * MIB, memory_available=mib * MIB)
        return machine(cgroup=limit)

    with pytest.raises(ConfigError) as error:
        resolve(inside(256))
    text = str(error.value)
    for needle in ("the weights need 93.46 MiB", "smallest KV cache 5.62 MiB", "(cgroup) is free"):
        assert needle in text
    least = float(text.split("with a margin ")[1].split(" MiB")[0])
    assert resolve(inside(least + 1)).config.kv_blocks >= 8
    with pytest.raises(ConfigError):
        resolve(inside(least - 1))


def test_half_of_what_is_free_goes_to_one_request_of_full_length():
    limit = Cgroup(version=1, memory_limit=GIB, memory_available=GIB)
    resolved = resolve(machine(cgroup=limit))
    assert (resolved.config.max_model_len, kv_bytes(resolved)) == (8192, 8192 * TOKEN)
    assert "at most half" in why(resolved, "kv_cache_space")


@pytest.mark.parametrize(
    ("total", "size", "reason"),
    [
        (16, 3.68, "a quarter of the free memory"),
        (256, 11.25, "as much as 64 requests of full length can use"),
        (1024, 11.25, "as much as 64 requests of full length can use"),
    ],
)
def test_the_cache_grows_with_the_machine_to_what_requests_can_use(total, size, reason):
    """64 requests of 8,192 tokens at 22.5 KiB each use 11.25 GiB."""
    resolved = resolve(machine(memory_total=total * GIB, memory_available=total * GIB))
    assert kv_bytes(resolved) == pytest.approx(size * GIB, rel=0.01)
    assert reason in why(resolved, "kv_cache_space")


@pytest.mark.parametrize(("total", "gib"), [(256, 60.11), (1024, 242.51)])
def test_a_long_context_takes_a_quarter_of_any_machine(total, gib):
    """64 requests of 131,072 tokens of a 1B model could use 256 GiB."""
    facts = dataclasses.replace(LLAMA_1B, max_position=131072)
    resolved = resolve(machine(memory_total=total * GIB, memory_available=total * GIB), facts)
    assert got(resolved, "kv_cache_space") == f"{gib:.2f} GiB"
    assert "a quarter of the free memory" in why(resolved, "kv_cache_space")


def test_a_longer_context_than_the_model_has_needs_a_word():
    with pytest.raises(ConfigError, match="CPUSERVE_ALLOW_LONG_MAX_MODEL_LEN=1"):
        resolve("vm_2core_zen5", max_model_len=16384)
    resolved = resolve("vm_2core_zen5", max_model_len=16384, allow_long_model_len=True)
    assert resolved.config.max_model_len == 16384
    assert "beyond the model's 8192" in why(resolved, "max_model_len")
    learned = dataclasses.replace(SMOLLM2, fixed_positions=True)
    with pytest.raises(ConfigError, match=r"give at most 8192$"):
        resolve("vm_2core_zen5", learned, max_model_len=16384, allow_long_model_len=True)


def windowed(*windows):
    layers = tuple(KvLayerFacts(8, 64, window) for window in windows)
    return dataclasses.replace(LLAMA_1B, kv_layers=layers, max_position=32768)


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((4096, 4096), [(4096, [0, 1])]),
        ((512, 4096), [(512, [0]), (4096, [1])]),
        ((4096, 0), [(0, [1]), (4096, [0])]),
        ((0, 0), [(0, [0, 1])]),
        ((32768, 32768), [(0, [0, 1])]),  # as long as the longest request
        ((512, 512, 512, 0, 512, 512), [(0, [3]), *((512, [n]) for n in (0, 1, 2, 4, 5))]),
        (
            (512, 0) * 2 + (512, 512),
            [(0, [1, 3]), (512, [0, 2]), (512, [4, 5])],
        ),
    ],
)
def test_layers_that_keep_the_same_tokens_form_groups(windows, groups):
    config = resolve("vm_2core_zen5", windowed(*windows)).config
    assert [(group.window, group.layers) for group in config.kv_groups] == groups
    assert config.max_model_len == 32768


def test_joined_layers_are_in_one_group():
    """Without that, each layer with a window is a group, like the layer without one."""
    windows, sizes = [0, *(512,) * 6], [64] * 7
    joined = [False, False, True, True, False, False, True]
    found = group_layers(windows, sizes, joined)
    assert [group.layers for group in found] == [[0], [1, 2, 3], [4, 5, 6]]
    assert [group.window for group in found] == [0, 512, 512]
    assert [group.layers for group in group_layers(windows, sizes)] == [[n] for n in range(7)]


def test_transformers_keeps_everything():
    facts = windowed(512, 0, 512)
    config = resolve(
        machine(torch=True, transformers=True), facts, model_impl="transformers"
    ).config
    assert [(g.window, g.layers) for g in config.kv_groups] == [(0, [0, 1, 2])]


def gemma(full, local):
    """Windows of 512 tokens in `local` layers and none in `full` others; 4 KiB a token and layer"""
    return windowed(*[0] * full, *[512] * local)


@pytest.mark.parametrize(
    ("full", "local", "groups", "unit"),
    [(4, 22, 7, 4), (5, 29, 7, 5), (8, 40, 6, 8), (10, 52, 13, 5), (13, 13, 2, 13)],
)
def test_groups_are_few_and_about_equal(full, local, groups, unit):
    config = resolve("vm_2core_zen5", gemma(full, local)).config
    assert len(config.kv_groups) == groups
    assert max(len(group.layers) for group in config.kv_groups) == unit
    assert sorted(n for g in config.kv_groups for n in g.layers) == list(range(full + local))
    assert groups * unit <= (full + local) * 13 / 12


LAYER = 2 * 32 * 8 * 64 * 2  # bytes of a block


def test_a_long_request_counts_what_its_groups_hold():
    """22 of 26 layers keep 512 tokens and one step, so 32k take a fifth of the memory."""
    one = 1024 + 6 * 33 + 1  # blocks of 4 layers: all of it, six windows, and the one for all freed
    size = f"{one * 4 * LAYER / MIB:.6f}MiB"
    facts = gemma(4, 22)
    resolved = resolve("vm_2core_zen5", facts, kv_cache_space=size)
    assert resolved.config.max_model_len == 32768
    assert resolved.config.kv_blocks == one
    assert why(resolved, "kv_blocks").endswith("full-length requests that fit: 1")
    assert "6 with a window of 512 tokens (up to 4 layers)" in got(resolved, "kv_groups")
    twice = f"{(2 * one - 1) * 4 * LAYER / MIB:.6f}MiB"
    assert why(resolve("vm_2core_zen5", facts, kv_cache_space=twice), "kv_blocks").endswith(
        "fit: 2"
    )
    kept = resolve("vm_2core_zen5", windowed(*[0] * 26), kv_cache_space=size)
    assert kept.config.max_model_len < 32768 / 4


def test_the_block_that_stands_for_freed_ones_is_counted():
    facts = windowed(0, 4096)
    size = f"{(1024 + 145) * LAYER / MIB:.6f}MiB"  # of 32768 tokens, if all could be used
    assert resolve("vm_2core_zen5", facts, kv_cache_space=size).config.max_model_len == 32768 - 32


def test_a_window_that_may_not_slide_bounds_the_length():
    options = {"disable_sliding_window": True}
    config = resolve("vm_2core_zen5", windowed(0, 4096), **options).config
    assert (config.max_model_len, len(config.kv_groups)) == (4096, 1)
    assert not config.kv_groups[0].window
    assert resolve("vm_2core_zen5", LLAMA_1B, **options).config.max_model_len == 131072
    with pytest.raises(ConfigError, match=r"give at most 4096, or drop that option"):
        resolve("vm_2core_zen5", windowed(4096), max_model_len=4097, **options)


def test_swap_space_is_what_was_asked_for_in_blocks():
    resolved = resolve("vm_2core_zen5", swap_space="2")
    assert resolved.config.swap_bytes == 2 * GIB
    assert why(resolved, "swap_space") == f"{2 * GIB // (32 * TOKEN)} blocks, as requested"
    assert resolve("vm_2core_zen5").config.swap_bytes == 0


def test_swap_space_that_does_not_fit_beside_the_cache_is_refused_with_the_most_that_does():
    with pytest.raises(ConfigError) as error:
        resolve("vm_2core_zen5", swap_space="100")
    for needle in ("100.00 GiB does not fit", "KV cache of 5.03 GiB", "give at most 15.09"):
        assert needle in str(error.value)
    assert resolve("vm_2core_zen5", swap_space="15.09").config.swap_bytes <= 15.09 * GIB


def test_further_tiers_are_kept_by_name_and_need_prefix_caching():
    asked = {"kv_tiers": ["a=/x=y", "b=host:1"]}
    resolved = resolve("vm_2core_zen5", **asked)
    assert resolved.config.kv_tiers == {"a": "/x=y", "b": "host:1"}
    assert got(resolved, "kv_tiers") == asked["kv_tiers"]
    off = resolve("vm_2core_zen5", **asked, enable_prefix_caching=False)
    assert off.config.kv_tiers == {}
    assert "off" in why(off, "kv_tiers")


def test_states_that_wait_to_be_written_to_files_are_counted():
    """At most one waits that is larger than the queue, beside one at either end of the queue."""
    recurrent = dataclasses.replace(SMOLLM2, state_bytes=256 << 20)
    most = []
    for options in ({}, {"prefix_cache_dir": "/a"}):
        with pytest.raises(ConfigError, match="at most") as refused:
            resolve("vm_2core_zen5", recurrent, max_num_seqs=1, kv_cache_space="1000", **options)
        most.append(float(re.search(r"at most ([0-9.]+)", str(refused.value))[1]))
    assert most[0] - most[1] == pytest.approx(0.75, abs=0.02)  # GiB: three states


def test_swap_space_without_prefix_caching_is_none():
    resolved = resolve("vm_2core_zen5", swap_space="2", enable_prefix_caching=False)
    assert resolved.config.swap_bytes == 0
    assert "off" in why(resolved, "swap_space")


def test_a_prefix_cache_directory_is_absolute_and_has_a_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve("vm_2core_zen5", prefix_cache_dir="here").config
    assert config.prefix_cache_dir == str(tmp_path / "here")
    assert config.prefix_cache_bytes == 4 * GIB
    config = resolve("vm_2core_zen5", prefix_cache_dir="/a", prefix_cache_size="512MiB").config
    assert config.prefix_cache_bytes == 512 * MIB
    for off in ({"prefix_cache_size": "0"}, {"enable_prefix_caching": False}):
        assert (
            resolve("vm_2core_zen5", prefix_cache_dir="/a", **off).config.prefix_cache_dir is None
        )


def test_blocks_that_wait_to_be_written_are_counted():
    def most(**options):
        with pytest.raises(ConfigError) as error:
            resolve("vm_2core_zen5", LLAMA_1B, kv_cache_space="999", **options)
        return float(re.search(r"give at most ([\d.]+)", str(error.value))[1])

    waiting = (32 + 2) * MIB / GIB  # a block of this model has 1 MiB
    assert most() - most(prefix_cache_dir="/a") == pytest.approx(waiting, abs=0.011)
    assert most() == most(prefix_cache_dir="/a", enable_prefix_caching=False)


def test_a_configuration_without_groups_has_one_of_all_layers():
    assert block_bytes([], [3, 4]) == 7  # as another platform may resolve it
