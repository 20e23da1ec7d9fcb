"""Each op of the native executor compared with the emulated Interpreter, over model families,
weight kinds and ISA levels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve import _C
from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.operations.hadamard import Hadamard
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.online import OnlineWeights
from cpuserve.quant.stored import QUANTIZED_KINDS
from cpuserve.runtime.torch_executor import load_tensors
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import fake_config
from tests.helpers.gpt_oss import published
from tests.helpers.levels import LEVELS, each_level, each_level_of_vectors
from tests.helpers.op_compare import compare
from tests.helpers.oracle import first_state  # it also gives torch one thread
from tests.helpers.quantized import ORDERED, quantized_copy
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import KINDS, SAMPLE, tiny_model

pytestmark = pytest.mark.matrix

KV = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(270)]


def checkpoint_of(family, dtype):
    return open_checkpoint(tiny_model(family, dtype=dtype))


class QuantizedWeights:
    """The weights of a checkpoint with random GGUF blocks in place of some matrices."""

    def __init__(self, weights, sources):
        self._weights = weights
        self._sources = sources  # suffix of the name -> source type
        self._cache = {}

    def names(self):
        return self._weights.names()

    def kind(self, name, dtype):
        source = self._source(name)
        return QUANTIZED_KINDS[source] if source else self._weights.kind(name, dtype)

    def get(self, name):
        tensor, source = self._weights.get(name), self._source(name)
        if source is None:
            return tensor
        if name not in self._cache:
            data = random_blocks(source, *tensor.shape, seed=len(self._cache))
            self._cache[name] = dataclasses.replace(tensor, source=source, data=data)
        return self._cache[name]

    def _source(self, name):
        for suffix, source in self._sources.items():
            if name.endswith(suffix) and len(self._weights.get(name).shape) == 2:
                return source
        return None


def random_blocks(source, rows, k, seed):
    """Random codes, with scales that give weights of variance about 1 / k."""
    stream = np.random.default_rng(seed)
    spread = {"gguf_q8_0": 74.0, "gguf_q4_0": 4.6, "gguf_q4_1": 4.6}[source]  # of the codes
    halves = 2 if source == "gguf_q4_1" else 1
    codes = 32 if source == "gguf_q8_0" else 16
    blocks = stream.integers(0, 256, (rows, k // 32, 2 * halves + codes), np.uint8)
    scale = (stream.uniform(0.7, 1.3, (rows, k // 32)) / spread / k**0.5).astype(np.float16)
    blocks[:, :, :2] = scale[..., None].view(np.uint8)
    if halves == 2:
        minimum = (scale * -7.5).astype(np.float16)
        blocks[:, :, 2:4] = minimum[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def executor_and_oracle(weights, config_dict, dtype, isa, kv=None):
    from cpuserve.runtime.native import NativeExecutor

    config = fake_config(
        max_num_batched_tokens=300,
        block_size=32,
        kv_blocks=16,
        max_model_len=400,
        dtype=dtype,
        kv_dtype=kv or KV[dtype],
        isa=isa,
        executor="native",
        state_slots=16,
    )
    program = build_program(spec_from_config(config_dict))
    executor = NativeExecutor(config, program, weights, _C.Team(1, None))
    for slot in (0, 1):
        executor.admit(slot, SlotRequest(SamplingParams(temperature=0), 0, [], [], []))
    matrices = [need.name for need in program.weights if need.role == "matrix"]
    oracle = Interpreter(
        program,
        load_tensors(program, weights),
        mode="emulated",
        kinds={name: weights.kind(name, dtype) for name in matrices},
        kv_dtype=kv or KV[dtype],
        num_blocks=16,
        num_states=16 if program.states else 0,
    )
    return executor, oracle


def mixed_steps(length, first_state):
    """Steps: a prompt, then a decode row of it together with the prompt of a second sequence."""
    a = Sequence(0, TOKENS[:length], [5, 2, 9, 1, 15, 0, 7, 8, 11, 3], first_state)
    b = Sequence(1, TOKENS[3:13], [4], first_state)
    yield step(a.chunk(length - 1, all_rows(3)))
    yield step(a.chunk(), b.chunk(None, all_rows(10)))


def first_difference(weights, config_dict, dtype, isa, length, kv=None):
    executor, oracle = executor_and_oracle(weights, config_dict, dtype, isa, kv)
    for i, arrays in enumerate(mixed_steps(length, first_state(oracle))):
        found = compare(executor, oracle, arrays, executor.lowered.source_op)
        if found is not None:
            return f"step {i}: {found}"
    return None


@pytest.mark.parametrize("dtype", KV)
@pytest.mark.parametrize("family", deep_but(SAMPLE, KINDS))
def test_every_op_of_every_family_agrees(family, dtype):
    checkpoint = checkpoint_of(family, dtype)
    found = first_difference(checkpoint.weights, checkpoint.config, dtype, LEVELS[-1], 40)
    assert found is None


def test_ngrams_separated_by_ends_of_texts_agree():
    checkpoint = checkpoint_of("qwen4-exp", "float32")
    executor, oracle = executor_and_oracle(
        checkpoint.weights, checkpoint.config, "float32", LEVELS[-1]
    )
    ends = [token if i % 7 and i != 22 else 2 for i, token in enumerate(TOKENS[:60])]
    sequence = Sequence(0, ends, [5, 2], first_state(oracle))
    for length in (1, 21, 1, 37):
        arrays = step(sequence.chunk(length, all_rows(1)))
        assert compare(executor, oracle, arrays, executor.lowered.source_op) is None


@pytest.mark.parametrize("dtype", deep_but(["float32"], ["bfloat16", "float32"]))
def test_every_op_of_a_mixture_of_many_tasks_agrees_whose_rows_are_added_in_parts(dtype):
    model = tiny_model("qwen3-moe", hidden_size=608, moe_intermediate_size=640)
    checkpoint = open_checkpoint(model)
    found = first_difference(checkpoint.weights, checkpoint.config, dtype, LEVELS[-1], 40)
    assert found is None


@each_level_of_vectors
@pytest.mark.parametrize("dtype", KV)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-next", "granite4-hybrid"])
def test_every_op_agrees_at_every_level_across_a_chunk_border(family, dtype, isa):
    checkpoint = checkpoint_of(family, dtype)
    assert first_difference(checkpoint.weights, checkpoint.config, dtype, isa, 270) is None


@each_level_of_vectors
@pytest.mark.parametrize("dtype", KV)
def test_every_op_of_latent_attention_agrees_at_every_level(dtype, isa):
    checkpoint = checkpoint_of("deepseek-v3", dtype)
    assert first_difference(checkpoint.weights, checkpoint.config, dtype, isa, 270) is None


@each_level_of_vectors
def test_every_op_of_small_parts_agrees(tmp_path, isa):
    made = tiny_model("gemma3n")
    for file in made.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(made / "model.safetensors")
    # Streams with a mean square below the floor, and one of zeros.
    for i, factor in enumerate((1e-5, 0.0, 1e-3)):
        tensors[f"model.altup_projections.{i}.weight"] *= np.float32(factor)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert first_difference(checkpoint.weights, checkpoint.config, "float32", isa, 40) is None


@each_level
@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "int8_v4"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v2", "gemma4"])
def test_every_op_over_a_kv_cache_of_codes_agrees(family, kv, isa):
    checkpoint = checkpoint_of(family, "bfloat16")
    assert first_difference(checkpoint.weights, checkpoint.config, "bfloat16", isa, 270, kv) is None


@each_level_of_vectors
def test_rotations_before_matrices_and_after_embeddings_agree(isa):
    checkpoint = checkpoint_of("llama", "float32")  # 64 columns, an MLP of 96
    layer = "model.layers.0"
    parts = (f"{layer}.self_attn.{n}_proj.weight" for n in "qkvo")
    grouped = [f"{layer}.self_attn.o_proj.weight"]
    rotation = {
        "block": 32,
        "matrices": [*parts, f"{layer}.mlp.down_proj.weight"],
        "tables": ["model.embed_tokens.weight"],
        "signs": {"64": "0123456789abcdef"},
        "grouped": grouped,
    }
    heads = {"linear_value_head_dim": 8, "linear_num_key_heads": 2}
    config = {**checkpoint.config, "gguf_rotation": rotation, **heads}
    program = build_program(spec_from_config(config))
    turns = [op for op in program.ops if isinstance(op, Hadamard)]
    assert [(op.inverse, op.width, op.key_heads) for op in turns] == [
        (True, 64, 1),
        (False, 64, 1),
        (False, 64, 2),
        (False, turns[3].width, 1),
    ]
    assert first_difference(checkpoint.weights, config, "float32", isa, 40) is None


MIXES = {
    "q8_0": {".weight": "gguf_q8_0"},
    "q4_0": {".weight": "gguf_q4_0"},
    "q4_1": {".weight": "gguf_q4_1"},
    "q4_1-with-q8_0": {
        "v_proj.weight": "gguf_q8_0",
        "down_proj.weight": "gguf_q8_0",
        "proj.weight": "gguf_q4_1",
    },
    "gate-and-up-differ": {
        "gate_proj.weight": "gguf_q4_0",
        "up_proj.weight": "gguf_q8_0",
        "k_proj.weight": "gguf_q4_1",
    },
}


@each_level_of_vectors
@pytest.mark.parametrize("sources", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "qwen3-moe", "deepseek-v2"],
    ids=["heads-of-16", "heads-of-32", "experts", "latent"],
)
def test_every_op_over_quantized_weights_agrees(family, sources, isa):
    checkpoint = checkpoint_of(family, "bfloat16")
    weights = QuantizedWeights(checkpoint.weights, sources)
    if family in ("qwen3-moe", "deepseek-v2") and sources is MIXES["gate-and-up-differ"]:
        with pytest.raises(ModelError, match=r"kinds w4_g32, w8_g32; .* must have one kind"):
            first_difference(weights, checkpoint.config, "bfloat16", isa, 40)
        return
    assert isinstance(weights.get("model.layers.0.self_attn.o_proj.weight"), QuantTensor)
    assert first_difference(weights, checkpoint.config, "bfloat16", isa, 40) is None


@each_level_of_vectors
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "mxfp4"])
def test_every_op_of_gpt_oss_agrees_beyond_its_clamp(packed, isa):
    checkpoint = open_checkpoint(published(tiny_model("gpt-oss"), packed=packed, bias=60.0))
    assert first_difference(checkpoint.weights, checkpoint.config, "bfloat16", isa, 270) is None


@each_level_of_vectors
@pytest.mark.parametrize(
    "scheme", ["int8", "int8_fine", "w8a8", "int4", "int4_fine", "int4_mixed", "int4_mixed_fine"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "deepseek-v2", "opt"])
def test_every_op_over_weights_quantized_while_loading_agrees(family, scheme, isa):
    checkpoint = checkpoint_of(family, "bfloat16")
    needs = build_program(spec_from_config(checkpoint.config)).weights
    weights = OnlineWeights(checkpoint.weights, needs, scheme)
    assert first_difference(weights, checkpoint.config, "bfloat16", isa, 40) is None


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Return a function of a family and a way to quantize: a checkpoint that all levels share."""
    sizes = {"intermediate_size": 192, "moe_intermediate_size": 128}

    @functools.cache
    def path_of(family, name):
        model = tiny_model(family, dtype="bfloat16", **sizes)
        return quantized_copy(model, name, tmp_path_factory.mktemp("quantized") / "m")

    return lambda family, name: open_checkpoint(path_of(family, name))


@each_level
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nf4", "fp4"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_every_op_over_codes_of_floats_agrees(family, name, isa, quantized):
    checkpoint = quantized(family, name)
    assert first_difference(checkpoint.weights, checkpoint.config, "bfloat16", isa, 40) is None


@each_level
@pytest.mark.parametrize(
    ("family", "name"),
    # Experts' gate and up are one matrix, so they cannot have orders of their own.
    [("qwen3-moe", "gptq"), *itertools.product(["llama", "phi3"], ORDERED)],
)
def test_every_op_over_matrices_in_activation_order_agrees(family, name, isa, quantized):
    checkpoint = quantized(family, name)
    assert first_difference(checkpoint.weights, checkpoint.config, "bfloat16", isa, 40) is None


@each_level
@pytest.mark.parametrize(
    "name",
    ["awq", "awq in groups of 64", "8 bits with zero points", "8 bits with zero points of 128"],
)
def test_every_op_over_codes_with_zero_points_agrees(name, isa, quantized):
    checkpoint = quantized("llama", name)
    assert first_difference(checkpoint.weights, checkpoint.config, "bfloat16", isa, 40) is None


class OneKind(OnlineWeights):
    """A checkpoint whose matrices are all packed into the same kind."""

    def __init__(self, weights, kind):
        super().__init__(weights, (), "int8")
        self._kind = kind

    def kind(self, name, dtype):
        del name, dtype
        return self._kind


@pytest.mark.parametrize("kind", ["w8_channel", "w8_channel_g128", "w4m_g128"])
def test_every_op_in_one_quantized_kind_agrees(kind):
    checkpoint = checkpoint_of("qwen2", "float32")
    weights = OneKind(checkpoint.weights, kind)
    assert first_difference(weights, checkpoint.config, "float32", LEVELS[-1], 40) is None


def test_a_wrong_weight_shows_in_its_own_op():
    checkpoint = checkpoint_of("qwen2", "float32")
    executor, oracle = executor_and_oracle(
        checkpoint.weights, checkpoint.config, "float32", LEVELS[-1]
    )
    oracle._tensors["model.layers.1.mlp.up_proj.weight"][5, 7] += 0.5
    found = compare(executor, oracle, next(mixed_steps(20, 0)), executor.lowered.source_op)
    assert found is not None
    assert "model.layers.1.mlp.up_proj.weight" in found.op.weights
    assert found.column == 5


def test_quantized_activations_show_against_the_reference():
    """The tolerance is small enough to detect that activations are quantized."""
    checkpoint = checkpoint_of("qwen3", "bfloat16")
    weights = QuantizedWeights(checkpoint.weights, MIXES["q4_1"])
    executor, _ = executor_and_oracle(weights, checkpoint.config, "bfloat16", LEVELS[-1])
    program = build_program(spec_from_config(checkpoint.config))
    reference = Interpreter(program, load_tensors(program, weights))
    found = compare(executor, reference, next(mixed_steps(40, 0)), executor.lowered.source_op)
    assert found is not None
