"""CpuPlatform.resolve on machines described as data."""

import dataclasses
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.config.decisions import render_table
from cpuserve.config.speculation import automatic
from cpuserve.config.values import format_cpus
from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.formats import CHECKPOINTS
from cpuserve.platforms.isa_level import isa_level_of
from cpuserve.quant.registry import BUILTIN
from tests.helpers.hosts import (
    GIB,
    LLAMA_1B,
    SMOLLM2,
    got,
    host_names,
    load_host,
    resolve,
    why,
)

SNAPSHOTS = Path(__file__).parent / "snapshots"
REFUSED = {"build_of_another_cpu"}


@pytest.mark.parametrize("name", [n for n in host_names() if n not in REFUSED])
def test_resolve_on_a_host_gives_the_reviewed_decisions(name, request):
    text = render_table(resolve(name).decisions) + "\n"
    file = SNAPSHOTS / f"{name}.txt"
    if not file.exists():
        file.write_text(text)
        pytest.fail(f"{file.name} did not exist and was written: review and commit it")
    assert text == file.read_text()


def test_every_snapshot_has_a_host():
    assert {p.stem for p in SNAPSHOTS.glob("*.txt")} == set(host_names()) - REFUSED


@pytest.mark.parametrize(
    ("name", "cpus", "frontend"),
    [
        ("vm_1core", [0], None),
        ("vm_2core_zen5", [0, 1], None),
        ("laptop_2core_smt", [0, 1], None),
        ("desktop_8core_smt", list(range(7)), [7, 15]),
        ("xeon_2s_amx", [*range(31), *range(32, 63)], [31, 63, 95, 127]),
        ("xeon_2s_amx_second_siblings", list(range(64, 95)), [95]),
        ("cpuset_4_11_of_16", list(range(4, 11)), [11]),
    ],
)
def test_auto_binding_takes_one_thread_per_allowed_core(name, cpus, frontend):
    engines = resolve(name).replicas
    config = engines[0]
    assert [cpu for engine in engines for cpu in engine.cpus] == cpus
    assert sum(engine.threads for engine in engines) == len(cpus)
    if frontend is not None:
        assert config.frontend_cpus == frontend


@pytest.mark.parametrize(
    ("name", "ranks", "lists", "frontend"),
    [
        ("vm_2core_zen5", {}, "0-1", None),
        ("desktop_8core_smt", {}, "0-6", "7,15"),
        ("xeon_2s_amx", {"tensor_parallel_size": 2}, "0-30|32-62", "31,63,95,127"),
        (
            "xeon_2s_amx",
            {"tensor_parallel_size": 6},
            "0-10|11-20|21-30|32-42|43-52|53-62",
            "31,63,95,127",
        ),
        ("cpuset_4_11_of_16", {}, "4-10", "11"),
        ("xeon_2s_amx_second_siblings", {}, "64-94", "95"),
        ("epyc_nps4", {"data_parallel_size": 4}, "0-14|16-30|32-46|48-62", "15,31,47,63"),
    ],
)
def test_known_machines_come_out_exactly(name, ranks, lists, frontend):
    """The placement that engines get; test_placement.py tests `place` on more machines."""
    engines = resolve(name, LLAMA_1B, **ranks).replicas
    of_ranks = []
    for engine in engines:
        cpus = iter(engine.cpus)
        of_ranks += [list(islice(cpus, size)) for size in engine.rank_threads]
        assert list(cpus) == []
        assert not engine.passive_waits
    assert "|".join(map(format_cpus, of_ranks)) == lists
    spared = engines[0].frontend_cpus
    assert (None if spared is None else format_cpus(spared)) == frontend


@pytest.mark.parametrize(
    ("options", "threads", "lists"),
    [
        ({}, [20], []),
        ({"tensor_parallel_size": 2}, [10, 10], ["0-31,64-95", "32-63,96-127"]),
        ({"data_parallel_size": 2}, [10, 10], ["0-31,64-95", "32-63,96-127"]),
        ({"visible_memory_nodes": "1"}, [20], ["32-63,96-127"]),
    ],
)
def test_engines_under_a_quota_move_within_the_nodes_of_their_ranks(options, threads, lists):
    host = load_host("xeon_2s_amx")
    group = msgspec.structs.replace(host.cgroup, cpu_quota=20.0)
    resolved = resolve(msgspec.structs.replace(host, cgroup=group), LLAMA_1B, **options)
    engines = resolved.replicas
    assert [n for engine in engines for n in engine.rank_threads] == threads
    assert [format_cpus(cpus) for engine in engines for cpus in engine.rank_cpus] == lists
    for engine in engines:
        assert (engine.cpus, engine.core_complexes, engine.thread_speeds) == (None, [], [])
        assert engine.passive_waits
        assert len(engine.thread_cpus or []) == (engine.threads if lists else 0)
        assert engine.compute_cpus == (sorted({c for r in engine.rank_cpus for c in r}) or None)


def test_threads_and_front_end_never_share_a_core():
    for name in set(host_names()) - REFUSED:
        host, config = load_host(name), resolve(name).config
        core = {c.id: c.core for c in host.cpus}
        if (host.cgroup.cpu_quota or len(host.usable_cpus)) < len(host.usable_cpus):
            assert (config.thread_cpus, config.frontend_cpus) == (None, None)
            continue
        assert config.cpus
        assert set(config.cpus) <= set(host.allowed)
        cores = [core[c] for c in config.cpus]
        assert len(set(cores)) == len(cores)
        assert not {core[c] for c in config.frontend_cpus or ()} & set(cores)


@pytest.mark.parametrize(
    ("bind", "cpus"),
    [("0", [0]), ("1,0", [1, 0]), ("0-62:2", list(range(0, 63, 2))), ("3-5,0", [3, 4, 5, 0])],
)
def test_a_bind_list_is_taken_in_its_order(bind, cpus):
    config = resolve("graviton3_64", omp_threads_bind=bind).config
    assert (config.cpus, config.threads) == (cpus, len(cpus))


def test_nobind_takes_omp_num_threads_and_pins_nothing():
    config = resolve("graviton3_64", omp_threads_bind="nobind", omp_num_threads=5).config
    assert (config.cpus, config.threads) == (None, 5)
    assert resolve("pod_quota_6_5_of_64", omp_threads_bind="nobind").config.threads == 6


def test_omp_num_threads_is_not_inherited_by_pinned_threads():
    assert resolve("vm_2core_zen5", omp_num_threads=1).config.threads == 2


@pytest.mark.parametrize(
    ("options", "needles"),
    [
        ({"omp_threads_bind": "0-2"}, ("CPU 2 is not", "0-1")),
        ({"omp_threads_bind": "0|1"}, ("2 list", "0-1")),
        ({"num_reserved_cpu": 2}, ("at most 1",)),
        ({"tensor_parallel_size": 3}, ("3 ranks need a core each", "use at most 2")),
        ({"tensor_parallel_size": 3, "omp_threads_bind": "nobind"}, ("a core each", "at most 2")),
        ({"omp_threads_bind": "0-1", "tensor_parallel_size": 2}, ("a list for each", "0|1")),
        ({"isa": "amx"}, ("not a level of this CPU", "scalar, avx2, avx512")),
        ({"isa": "neon"}, ("not a level of this CPU",)),
        ({"isa": "avx1024"}, ("unknown level;", "avx512_bf16")),
        ({"executor": "torch"}, ("torch is not installed", "pip install")),
        ({"model_impl": "transformers"}, ("transformers", "pip install")),
        ({"quantization": "awq"}, ("gguf q4_1", "leave the option out")),
        ({"kv_cache_space": "1000"}, ("does not fit", "give at most 20.")),
        ({"kv_cache_space": "0.05", "max_model_len": 8192}, ("0.176", "--max-model-len 2304")),
        ({"kv_cache_space": "1MiB"}, ("holds 32 tokens", "CPUSERVE_KVCACHE_SPACE=0.006")),
        ({"max_model_len": 9000}, ("at most 8192",)),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, ("at least 16", "--max-num-seqs 8")),
    ],
)
def test_a_wish_that_cannot_be_honoured_names_the_nearest_value(options, needles):
    name = next(iter(options))
    with pytest.raises(ConfigError) as error:
        resolve("vm_2core_zen5", sources={name: f"flag --{name}"}, **options)
    for needle in (*needles, f"flag --{name}={options[name]}"):
        assert needle in str(error.value)


@pytest.mark.parametrize("level", ["scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16"])
def test_isa_may_be_lowered_to_any_level_of_the_cpu(level):
    assert resolve("vm_2core_zen5", isa=level).config.isa == level


@pytest.mark.parametrize(
    ("vendor", "levels", "expected", "reason"),
    [
        ("GenuineIntel", ("avx512_bf16",), "avx512_vnni", "multiplies bf16 more slowly"),
        ("GenuineIntel", ("avx512_bf16", "amx"), "amx", "the highest level"),
        ("GenuineIntel", (), "avx512_vnni", "the highest level"),
        ("AuthenticAMD", ("avx512_bf16",), "avx512_bf16", "the highest level"),
        ("", ("avx512_bf16",), "avx512_bf16", "the highest level"),
    ],
)
def test_intel_cores_without_amx_widen_bf16_because_they_multiply_it_slowly(
    vendor, levels, expected, reason
):
    host = msgspec.structs.replace(
        load_host("vm_2core_zen5"),
        cpu_vendor=vendor,
        isa_levels=("scalar", "avx2", "avx512", "avx512_vnni", *levels),
    )
    resolved = resolve(host)
    assert resolved.config.isa == expected
    assert reason in why(resolved, "isa")
    level, means = isa_level_of(host)
    assert level == expected
    assert ("more slowly" in means) == ("more slowly" in reason)
    asked = resolve(host, isa=host.isa_levels[-1])
    assert asked.config.isa == host.isa_levels[-1]


def test_without_a_kernel_level_torch_is_the_floor_and_says_so():
    resolved = resolve("no_extension")
    assert resolved.config.executor == "torch"
    assert "slower" in why(resolved, "executor")


def test_a_cpu_without_avx2_runs_the_kernels_without_vectors_although_torch_is_there():
    resolved = resolve("old_cpu_with_torch")
    assert (resolved.config.executor, resolved.config.isa) == ("native", "scalar")
    assert why(resolved, "isa") == "the highest level that this CPU runs"
    assert resolve("old_cpu_with_torch", executor="torch").config.executor == "torch"


def test_a_build_with_too_few_levels_says_which_is_missing_and_which_are_built():
    resolved = resolve("build_for_avx2")
    assert (resolved.config.executor, resolved.config.isa) == ("native", "avx2")
    assert why(resolved, "isa").endswith("this CPU could run avx512_bf16")
    with pytest.raises(ConfigError, match=r"not in this build; levels .*: avx2; .*native pip"):
        resolve("build_for_avx2", isa="avx512")


def test_without_kernels_and_torch_both_remedies_are_named():
    built = r"\(it has: avx512, avx512_vnni\).*CPUSERVE_LEVELS=native pip install .*\[torch\]"
    with pytest.raises(ConfigError, match=built):
        resolve("build_of_another_cpu")
    with pytest.raises(ConfigError, match=r"cpuserve\._C.*reinstall cpuserve .*: pip install"):
        resolve(msgspec.structs.replace(load_host("no_extension"), torch=False))


@pytest.mark.parametrize(
    ("checkpoint", "asked", "dtype", "kv", "needle"),
    [
        ("bfloat16", None, "bfloat16", "bf16", "multiplies it directly"),
        ("float16", None, "float16", "f16", "computed in float32"),
        ("float32", None, "float32", "f32", "as in the checkpoint"),
        ("float32", "bfloat16", "bfloat16", "bf16", "the checkpoint has float32"),
        ("bfloat16", "float32", "float32", "f32", "as requested"),
    ],
)
def test_dtype_of_a_dense_checkpoint(checkpoint, asked, dtype, kv, needle):
    facts = dataclasses.replace(SMOLLM2, dtype=checkpoint, quantization=None)
    resolved = resolve("vm_2core_zen5", facts, dtype=asked)
    assert (resolved.config.dtype, resolved.config.kv_dtype) == (dtype, kv)
    assert needle in why(resolved, "dtype")


@pytest.mark.parametrize(
    ("options", "told"), [({}, True), ({"isa": "avx2"}, False), ({"dtype": "float16"}, False)]
)
def test_a_dense_checkpoint_in_float16_tells_of_the_faster_type_where_there_is_one(options, told):
    facts = dataclasses.replace(SMOLLM2, dtype="float16", quantization=None)
    resolved = resolve("vm_2core_zen5", facts, **options)
    assert ("--dtype bfloat16 runs prompts faster" in why(resolved, "dtype")) is told


@pytest.mark.parametrize(
    ("checkpoint", "options", "dtype", "needle"),
    [
        ("float32", {}, "bfloat16", "hardly need; this level multiplies it directly"),
        ("float32", {"dtype": "float32"}, "float32", "as requested"),
        ("float32", {"isa": "avx2"}, "float32", "as in the checkpoint"),
        ("float16", {}, "float16", "as in the checkpoint"),
    ],
)
def test_an_encoder_in_float32_is_computed_in_bfloat16_where_dot_products_take_it(
    checkpoint, options, dtype, needle
):
    facts = dataclasses.replace(
        SMOLLM2, dtype=checkpoint, quantization=None, whole_prompts=True, pooling="mean"
    )
    resolved = resolve("vm_2core_zen5", facts, **options)
    assert resolved.config.dtype == dtype
    assert needle in why(resolved, "dtype")


def test_dtype_of_a_quantized_checkpoint_is_bfloat16_beside_the_stored_matrices():
    resolved = resolve("vm_2core_zen5")
    assert (resolved.config.dtype, resolved.config.kv_dtype) == ("bfloat16", "bf16")
    assert "keep their format" in why(resolved, "dtype")


@pytest.mark.parametrize(
    ("weights", "asked", "bits", "needle"),
    [
        (134_479_872, None, 16, "134 million weights"),
        (299_999_999, "auto", 16, "could change answers"),
        (300_000_000, "auto", 8, "enough for 300 million"),
        (134_479_872, "8", 8, "as requested"),
        (1_235_746_816, "16", 16, "as requested"),
    ],
)
def test_activations_of_a_small_quantized_model_have_16_bits(weights, asked, bits, needle):
    facts = dataclasses.replace(SMOLLM2, matrix_weights=weights)
    resolved = resolve("vm_2core_zen5", facts, activation_bits=asked)
    assert resolved.config.activation_bits == got(resolved, "activation_bits") == bits
    assert needle in why(resolved, "activation_bits")


@pytest.mark.parametrize(
    ("host", "facts"),
    [
        ("vm_2core_zen5", LLAMA_1B),
        ("vm_2core_zen5", dataclasses.replace(LLAMA_1B, matrix_weights=1000)),
        ("no_extension", SMOLLM2),
    ],
    ids=["dense", "small dense", "torch"],
)
def test_activation_bits_are_said_only_where_they_matter(host, facts):
    resolved = resolve(host, facts)
    assert resolved.config.activation_bits == 8
    assert "activation_bits" not in {d.field for d in resolved.decisions}
    assert got(resolve(host, facts, activation_bits="16"), "activation_bits") == "no effect"


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "int4", "int4_mixed", "INT8"])
def test_a_dense_checkpoint_can_be_quantized_while_loading(scheme):
    resolved = resolve("vm_2core_zen5", LLAMA_1B, quantization=scheme, activation_bits="16")
    assert resolved.config.quantize == got(resolved, "quantization") == scheme.lower()
    assert "quantized while loading" in why(resolved, "quantization")
    assert (resolved.config.activation_bits, got(resolved, "activation_bits")) == (8, "no effect")
    assert "use int8" in why(resolved, "activation_bits")


def test_a_small_model_gets_finer_int8():
    facts = dataclasses.replace(SMOLLM2, quantization=None)
    resolved = resolve("vm_2core_zen5", facts, quantization="int8")
    assert (resolved.config.quantize, got(resolved, "quantization")) == ("int8_fine", "int8")
    assert "per 32" in why(resolved, "quantization")
    assert resolved.config.activation_bits == got(resolved, "activation_bits") == 16
    assert resolve("vm_2core_zen5", facts, quantization="int4").config.quantize == "int4_fine"
    assert resolve("vm_2core_zen5", facts, quantization="w8a8").config.quantize == "w8a8"


def test_what_a_checkpoint_leaves_unquantized_can_be_quantized_while_loading():
    facts = dataclasses.replace(LLAMA_1B, quantization="compressed-tensors")
    resolved = resolve("vm_2core_zen5", facts, quantization="int8")
    assert (resolved.config.quantize, got(resolved, "quantization")) == ("int8", "int8")
    assert why(resolved, "quantization").startswith("compressed-tensors is kept; all else quant")
    assert resolve("vm_2core_zen5", facts).config.quantize == "none"


@pytest.mark.parametrize(("two_terms", "bits"), [(False, 8), (True, 16)])
def test_a_small_model_gets_two_terms_if_its_weights_can_multiply_them(two_terms, bits):
    facts = dataclasses.replace(SMOLLM2, quantization="compressed-tensors", two_terms=two_terms)
    assert resolve("vm_2core_zen5", facts).config.activation_bits == bits
    named = resolve("vm_2core_zen5", facts, quantization="compressed-tensors")
    assert named.config.quantize == "none"


def test_quantized_weights_leave_more_room_for_keys_and_values():
    host = "container_1_5_cpu_1gib"
    facts = dataclasses.replace(LLAMA_1B, weight_bytes=300_000_000)
    schemes = (None, "int8", "int4_mixed", "int4")
    blocks = [resolve(host, facts, quantization=q).config.kv_blocks for q in schemes]
    assert blocks == sorted(set(blocks))


def test_without_quantization_matrices_stay_as_they_are():
    assert resolve("vm_2core_zen5", LLAMA_1B).config.quantize == "none"
    assert resolve("vm_2core_zen5").config.quantize == "none"


@pytest.mark.parametrize(
    ("facts", "asked", "needle"),
    [
        (SMOLLM2, "int8", "gguf q4_1"),
        (LLAMA_1B, "awq", "only be quantized to int8, w8a8, int4 or int4_mixed"),
        (dataclasses.replace(LLAMA_1B, quantization="gptq"), "int4", "gptq"),
    ],
)
def test_a_quantization_that_cannot_be_made_is_refused(facts, asked, needle):
    with pytest.raises(ConfigError, match=needle):
        resolve("vm_2core_zen5", facts, quantization=asked)


def test_the_format_a_config_names_is_taken_and_may_be_named():
    facts = dataclasses.replace(LLAMA_1B, quantization="gptq")
    for asked in (None, "gptq"):
        resolved = resolve("vm_2core_zen5", facts, quantization=asked)
        assert (got(resolved, "quantization"), resolved.config.quantize) == ("gptq", "none")


def test_every_format_of_checkpoints_can_be_named():
    assert set(CHECKPOINTS) == BUILTIN.keys() - {"dense"}


def test_kv_dtype_can_differ_from_the_dtype():
    assert resolve("vm_2core_zen5", kv_cache_dtype="float32").config.kv_dtype == "f32"
    for coded in ("int8", "fp8_e4m3", "int8_v4"):
        assert resolve("vm_2core_zen5", kv_cache_dtype=coded).config.kv_dtype == coded


def test_four_bit_values_hold_more_tokens_in_the_same_memory():
    """A head of SmolLM2 has 64 columns: 64 + 4 bytes of keys and 32 + 4 bytes of values."""
    options = {"kv_cache_space": "256MiB"}
    eight, four = (
        resolve("vm_2core_zen5", kv_cache_dtype=kv, **options) for kv in ("int8", "int8_v4")
    )
    assert "30 layers x 3 heads x (64 + 4 + 32 + 4) bytes" in why(four, "kv_blocks")
    assert eight.config.kv_blocks == (256 << 20) // (30 * 3 * 32 * 2 * 68)
    assert four.config.kv_blocks == (256 << 20) // (30 * 3 * 32 * 104)


def test_four_bit_values_become_int8_where_there_are_none():
    latent = tuple(dataclasses.replace(kv, latent=True) for kv in SMOLLM2.kv_layers)
    facts = dataclasses.replace(SMOLLM2, kv_layers=latent)
    resolved = resolve("vm_2core_zen5", facts, kv_cache_dtype="int8_v4")
    assert resolved.config.kv_dtype == "int8"
    assert why(resolved, "kv_cache_dtype").startswith("instead of int8_v4: the keys")
    torch = resolve("old_cpu_with_torch", kv_cache_dtype="int8_v4", executor="torch")
    assert torch.config.kv_dtype == "int8"
    assert why(torch, "kv_cache_dtype").startswith("instead of int8_v4: the torch executor")


def test_fp8_e5m2_of_vllm_command_lines_becomes_int8():
    resolved = resolve("vm_2core_zen5", kv_cache_dtype="fp8_e5m2")
    assert resolved.config.kv_dtype == got(resolved, "kv_cache_dtype") == "int8"
    assert why(resolved, "kv_cache_dtype").startswith("instead of fp8_e5m2")
    blocks = resolve("vm_2core_zen5", kv_cache_dtype="int8").config.kv_blocks
    assert resolved.config.kv_blocks == blocks


def block_bytes(facts=SMOLLM2, element=2):
    return sum(2 * 32 * element * k.kv_heads * k.head_dim for k in facts.kv_layers)


@pytest.mark.parametrize(
    ("space", "size"),
    [("4", 4 * GIB), ("0.25", GIB // 4), ("512MiB", GIB // 2), ("30%", int(24 * GIB * 0.3))],
)
def test_an_explicit_kv_size_becomes_blocks_of_this_model(space, size):
    config = resolve("vm_2core_zen5", kv_cache_space=space).config
    assert config.kv_blocks == size // block_bytes()
    assert config.max_model_len == min(8192, config.kv_blocks * 32)


def test_the_automatic_kv_size_is_a_quarter_of_free_memory_or_what_requests_can_use():
    assert resolve("xeon_2s_amx").config.kv_blocks == 64 * 8192 // 32
    small = resolve("laptop_2core_smt").config
    assert small.kv_blocks * block_bytes() < 8 * GIB * 0.9 / 4


def test_the_automatic_kv_size_is_no_more_than_all_requests_can_use():
    config = resolve("xeon_2s_amx", max_num_seqs=2, max_model_len=1024).config
    assert config.kv_blocks == 2 * 1024 // 32


def test_a_small_pool_caps_the_default_length_instead_of_refusing():
    host = load_host("laptop_2core_smt")
    resolved = resolve(host, LLAMA_1B)
    config = resolved.config
    assert 256 < config.max_model_len < LLAMA_1B.max_position
    assert config.max_model_len == config.kv_blocks * 32
    assert "131072 would need 4.00 GiB" in why(resolved, "max_model_len")


def test_an_explicit_length_grows_the_automatic_pool():
    config = resolve("laptop_2core_smt", LLAMA_1B, max_model_len=65536).config
    assert config.max_model_len == 65536
    assert config.kv_blocks == 65536 // 32


def busy_laptop():
    return msgspec.structs.replace(load_host("laptop_2core_smt"), memory_available=6 * GIB)


def test_the_largest_length_named_in_the_error_is_accepted():
    host = busy_laptop()
    with pytest.raises(ConfigError, match=r"needs 4.00 GiB of KV .*--max-model-len \d+") as error:
        resolve(host, LLAMA_1B, max_model_len=131072)
    largest = int(str(error.value).rsplit(" ", 1)[1])
    assert resolve(host, LLAMA_1B, max_model_len=largest).config.max_model_len == largest
    with pytest.raises(ConfigError):
        resolve(host, LLAMA_1B, max_model_len=largest + 32)


def test_the_largest_kv_size_named_in_the_error_is_accepted():
    with pytest.raises(ConfigError) as error:
        resolve("vm_2core_zen5", kv_cache_space="1000")
    largest = str(error.value).split("at most ")[1].split(",")[0]
    assert resolve("vm_2core_zen5", kv_cache_space=largest).config.kv_blocks > 0


def test_the_kv_size_named_in_the_error_is_large_enough():
    with pytest.raises(ConfigError) as error:
        resolve("vm_2core_zen5", kv_cache_space="1MiB", max_model_len=4096)
    enough = str(error.value).split("CPUSERVE_KVCACHE_SPACE=")[1].split(",")[0]
    config = resolve("vm_2core_zen5", kv_cache_space=enough, max_model_len=4096).config
    assert config.max_model_len == 4096


def test_memory_is_counted_inside_the_container():
    config = resolve("container_1_5_cpu_1gib").config
    assert config.kv_blocks * block_bytes() < GIB // 4
    host = load_host("container_1_5_cpu_1gib")
    limit = Cgroup(version=2, memory_limit=256 << 20, memory_available=250 << 20)
    with pytest.raises(ConfigError, match=r"not enough memory: .* is free"):
        resolve(msgspec.structs.replace(host, cgroup=limit))


def test_a_step_holds_a_token_of_every_request():
    assert resolve("vm_2core_zen5", max_num_batched_tokens=8).config.max_num_seqs == 8
    config = resolve("vm_2core_zen5", max_num_seqs=4096).config
    assert config.max_num_batched_tokens == 4096


RECOMMENDED = dataclasses.replace(
    SMOLLM2, generation={"temperature": 0.0, "top_k": 20}, generation_why="a reason"
)


@pytest.mark.parametrize(
    ("override", "result"),
    [
        (None, {"temperature": 0.0, "top_k": 20}),
        ({}, {"temperature": 0.0, "top_k": 20}),
        ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 20}),
        ({"temperature": None, "max_new_tokens": 9}, {"top_k": 20, "max_tokens": 9}),
    ],
)
def test_default_sampling_is_the_models_under_what_is_asked(override, result):
    resolved = resolve("vm_2core_zen5", RECOMMENDED, override_generation_config=override)
    assert resolved.config.default_sampling == result
    assert got(resolved, "generation_config") == RECOMMENDED.generation
    assert why(resolved, "generation_config") == "a reason"
    if override is not None:
        assert got(resolved, "override_generation_config") == result


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ({}, (5, 4, 2)),
        ({"num_speculative_tokens": 8}, (8, 4, 2)),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": 1}, (5, 3, 1)),
        ({"prompt_lookup_max": 7, "prompt_lookup_min": None}, (5, 7, 7)),
        ({"prompt_lookup_min": 3}, (5, 3, 3)),
    ],
)
def test_speculation_has_vllms_names_and_its_rule_for_one_length(asked, numbers):
    resolved = resolve("vm_2core_zen5", speculative_config={"method": "ngram", **asked})
    found = resolved.config.speculation
    assert (
        found.num_speculative_tokens,
        found.prompt_lookup_max,
        found.prompt_lookup_min,
    ) == numbers
    assert got(resolved, "speculative_config") == msgspec.structs.asdict(found)
    assert got(resolved, "speculate") == "auto"


def test_drafts_are_on_by_default_where_steps_have_rows_for_them():
    assert resolve("vm_2core_zen5").config.speculation == automatic()
    assert resolve("vm_2core_zen5", speculate="auto").config.speculation == automatic()
    plain = resolve("vm_2core_zen5", speculate="off")
    assert plain.config.speculation is None
    assert got(plain, "speculate") == got(plain, "speculative_config") == "off"


@pytest.mark.parametrize(
    "asked",
    [{"speculative_config": {"method": "ngram"}}, {"model_draft": "small"}, {"draft_max": 3}],
    ids=lambda asked: next(iter(asked)),
)
def test_options_of_drafts_are_refused_without_drafts(asked):
    (name,) = asked
    with pytest.raises(ConfigError, match=f"^speculate is off, but {name} asks for draft tokens"):
        resolve("vm_2core_zen5", speculate="off", **asked)


def test_a_line_says_that_draft_max_has_no_effect_where_drafts_are_off_by_themselves():
    resolved = resolve("old_cpu_with_torch", executor="torch", draft_max=3)
    assert resolved.config.speculation is None
    assert got(resolved, "draft_max") == "no effect"
    assert got(resolve("vm_2core_zen5", draft_max=3), "draft_max") == 3


def test_a_line_says_that_states_limit_the_tokens_of_a_draft():
    recurrent = dataclasses.replace(LLAMA_1B, state_bytes=1 << 20)
    resolved = resolve("vm_2core_zen5", recurrent, draft_max=40)
    assert got(resolved, "draft_max") == 14
    assert "states every 16 tokens" in why(resolved, "draft_max")
    assert got(resolve("vm_2core_zen5", recurrent, draft_max=14), "draft_max") == 14
    assert got(resolve("vm_2core_zen5", LLAMA_1B, draft_max=40), "draft_max") == 40


def test_kv_events_are_off_without_a_prefix_cache_and_each_engine_has_its_number():
    asked = {"enable_kv_cache_events": True, "topic": "kv"}
    resolved = resolve("xeon_2s_amx", kv_events_config=asked, data_parallel_size=2)
    engines = [resolved.config, *resolved.others]
    assert [engine.kv_events.rank for engine in engines] == [0, 1]
    assert {engine.kv_events.topic for engine in engines} == {"kv"}
    assert got(resolved, "kv_events_config")["endpoint"] == "tcp://*:5557"
    for off in ({"enable_prefix_caching": False}, {"kv_events_config": {"topic": "kv"}}):
        resolved = resolve("vm_2core_zen5", **{"kv_events_config": asked, **off})
        assert resolved.config.kv_events is None
        assert got(resolved, "kv_events_config") == "off"


def test_hints_degrade_with_a_line():
    resolved = resolve("vm_2core_zen5", block_size=128, enforce_eager=True)
    assert resolved.config.block_size == 32
    assert got(resolved, "block_size") == 32
    assert got(resolved, "enforce_eager") == "no effect"


def test_resolve_is_pure():
    host = load_host("epyc_nps4")
    assert resolve(host) == resolve(host)


def test_the_engine_config_survives_msgpack():
    config = resolve("vm_2core_zen5").config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=type(config)) == config


@pytest.mark.parametrize(
    ("name", "ranks", "cpus", "sizes"),
    [
        ("vm_2core_zen5", 2, [0, 1], [1, 1]),
        ("xeon_2s_amx", 2, [*range(31), *range(32, 63)], [31, 31]),
        ("xeon_2s_amx", 6, [*range(31), *range(32, 63)], [11, 10, 10, 11, 10, 10]),
    ],
)
def test_ranks_are_honoured_on_any_host(name, ranks, cpus, sizes):
    config = resolve(name, tensor_parallel_size=ranks).config
    assert (config.tensor_parallel_size, config.cpus) == (ranks, cpus)
    assert config.rank_threads == sizes
    assert config.threads == sum(sizes)


def test_threads_know_their_core_complex():
    host = load_host("epyc_nps4")
    l3 = {cpu.id: cpu.l3 for cpu in host.cpus}
    assert len(set(l3.values())) > 4
    for config in resolve("epyc_nps4", data_parallel_size=4).replicas:
        assert config.core_complexes == [l3[cpu] for cpu in config.cpus]
    assert resolve("epyc_nps4", omp_threads_bind="nobind").config.core_complexes == []


def test_the_torch_floor_is_not_split():
    with pytest.raises(ConfigError, match=r"tensor.parallel.size.*cannot split.*use 1"):
        resolve("no_extension", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (None, ["smollm2:135m"]),
        (["*"], ["smollm2:135m", "*"]),
        (["*", "a", "b"], ["a", "b", "*"]),
        (["a"], ["a"]),
    ],
)
def test_a_model_that_accepts_any_name_keeps_a_name_of_its_own(asked, names):
    resolved = resolve("vm_2core_zen5", served_model_name=asked)
    assert resolved.config.served_model_names == names
    assert got(resolved, "served_model_name") == names
