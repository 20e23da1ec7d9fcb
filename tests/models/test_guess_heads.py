"""Heads for multi-token prediction, compared with a layer of transformers, as they are defined."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpuserve import _C
from cpuserve.base.errors import ModelError
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.loader.load import open_checkpoint
from cpuserve.loader.speculation.guess_heads import open_head
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.lower import Lowering
from cpuserve.program.operations.dense import Embed
from cpuserve.program.parts import stored_needs
from cpuserve.quant import dequantize
from cpuserve.runtime.executor import rows_by_slot
from cpuserve.runtime.native import fill_vectors, pack_matrices
from cpuserve.runtime.pack import pack
from tests.helpers.gguf_convert import convert
from tests.helpers.guess_head import FAMILIES, head_of, is_offset, own_matrices, with_head
from tests.helpers.oracle import transformers_of
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import copy_of, tiny_model

TOKENS = [(i * 37 + i * i * 5) % 384 for i in range(70)]
BLOCKS = [5, 2, 7]


# With the usual number of experts, two of them have almost equal scores for one of TOKENS.
OWN = {"mimo-v2": {"n_routed_experts": 6}}

# What the config of a model of one layer says about this layer, which is that of a head.
KINDS = {
    "exaone-moe": {
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["dense"],
        "first_k_dense_replace": 1,
    },
    "hy-v3": {"mlp_layer_types": ["sparse"]},
    "bailing-hybrid": {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0,
    },
    "nemotron-h-moe": {"num_hidden_layers": 2, "hybrid_override_pattern": "*E"},
    "step3.5": {
        "layer_types": ["sliding_attention"],
        "moe_layers_enum": "",
        "rope_theta": [1e4],
        "partial_rotary_factors": [1.0],
        "swiglu_limits": [0.0],
        "swiglu_limits_shared": [0.0],
    },
}
# transformers has no Ling 2, but Sarvam with the same layers.
SARVAM = {
    "architectures": ["SarvamMoEForCausalLM"],
    "model_type": "sarvam_moe",
    "rope_theta": 6e5,
}
# The epsilon of norms, if it is not in the config.
EPS = dict.fromkeys(("longcat", "exaone-moe", "hy-v3", "nemotron-h-moe", "step3.5"), 1e-5)

# The layer of LongCat's head is one of DeepSeek V3 without experts.
DENSE_LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    family = request.param
    return with_head(tmp_path_factory.mktemp("head") / family, family, **OWN.get(family, {}))


def one_layer(path, head, directory):
    """A model of transformers with the layer of the head, its last norm, and the output matrix."""
    config = json.loads((path / "config.json").read_text())
    kinds = {"layer_types": ["full_attention"], "first_k_dense_replace": 0}
    if path.name == "mimo-v2":
        kinds = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
    elif path.name == "ernie4.5-moe":
        kinds = {"mlp_layer_types": ["dense"], "moe_layer_start_index": 1}
    elif path.name == "longcat":
        kinds = DENSE_LATENT
    elif path.name == "deepseek-v4":
        kinds = {"layer_types": ["sliding_attention"], "num_hash_layers": 0}
    elif path.name in KINDS:
        kinds = KINDS[path.name]
    elif path.name == "glm4-moe-lite":
        kinds = {"mlp_layer_types": ["sparse"]}
    elif "index_topk" in config:
        kinds = {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
        kinds["first_k_dense_replace"] = 0
    stored = load_file(path / "model.safetensors")
    needs = (need.name for need in stored_needs(head.program.weights))
    tensors = {n: stored[head.stored(n)] for n in needs if not n.startswith("guess.")}
    if path.name == "longcat":  # its scales of queries and of compressed keys, as of norms
        for part, rank in (("q_a", "q_lora_rank"), ("kv_a", "kv_lora_rank")):
            name = f"model.layers.0.self_attn.{part}_layernorm.weight"
            tensors[name] = tensors[name] * (config["hidden_size"] / config[rank]) ** 0.5
        kinds = {**kinds, "intermediate_size": config["ffn_hidden_size"]}
    kinds = {**kinds, "tie_word_embeddings": head.spec.tied}
    kinds = {**kinds, **SARVAM} if path.name == "ling2" else kinds
    directory.mkdir()
    config = {**config, "num_hidden_layers": 1, **kinds}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return transformers_of(directory)


def published(path, head, directory, **options):
    """Hidden states of TOKENS, and the logits of the head: DeepSeek-V3, section 2.2, equation 21.

    The embedding of the next token and the hidden state are normalized, joined and projected. The
    layer, the last norm and the output matrix follow.

    options: values of the config that differ from those of tiny models.
    """
    config = json.loads((path / "config.json").read_text())
    stored = load_file(path / "model.safetensors")
    eps = config.get("rms_norm_eps", EPS.get(path.name, 1e-6))
    offset = float(is_offset(path.name))

    def norm(x, name):
        weight = stored[head.stored(f"guess.{name}.weight")].float() + offset
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    if path.name == "deepseek-v4":
        return of_streams(path, head, directory, stored, norm)

    with torch.inference_mode():
        # the same one without a head
        source = tiny_model(path.name, **OWN.get(path.name, {}), **options)
        if path.name == "ling2":
            source = copy_of(source, "sarvam-")
            (source / "config.json").write_text(json.dumps({**config, **SARVAM}))
        model, seen = transformers_of(source), []
        hook = last_norm(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        hidden = model.model(torch.tensor([TOKENS])).last_hidden_state[0]
        hook.remove()
        hidden = seen[0][0] if path.name == "step3.5" else hidden  # before the last norm
        table = next(op.weight for op in head.program.ops if isinstance(op, Embed))
        after = stored[head.stored(table)].float()[TOKENS[1:]]
        both = norm(after, "embedding_norm"), norm(hidden[:-1], "hidden_norm")
        both = both[::-1] if path.name == "qwen2" else both  # MiMo 7B
        x = torch.cat(both, dim=1) @ stored[head.stored("guess.fc.weight")].float().T
        logits = one_layer(path, head, directory)(inputs_embeds=x[None]).logits[0]
    return hidden.numpy(), logits.numpy()


def last_norm(model):
    """The last norm of a model of transformers."""
    return next(m for name, m in model.model.named_children() if name in ("norm", "norm_f"))


def of_streams(path, head, directory, stored, norm):
    """As `published`, for DeepSeek V4: DeepSeekV4MultiTokenPredictorLayer of vLLM.

    The head reads all streams after the last layer. Each is normalized, projected, and added to
    the embedding of the next token, which is normalized and projected as well.
    """
    streams = []

    def keep(_, inputs):
        streams.append(inputs[0])

    def give(_, inputs, kwargs):
        del inputs
        return (x[None],), kwargs

    with torch.inference_mode():
        model = transformers_of(tiny_model(path.name)).model
        hook = model.hc_head.register_forward_pre_hook(keep)
        model(torch.tensor([TOKENS]))
        hook.remove()
        after = norm(stored["model.embed_tokens.weight"].float()[TOKENS[1:]], "embedding_norm")
        after = after @ stored[head.stored("guess.e_proj.weight")].float().T
        hidden = norm(streams[0][0, :-1], "hidden_norm")
        x = hidden @ stored[head.stored("guess.h_proj.weight")].float().T + after[:, None]
        layer = one_layer(path, head, directory)
        layer.model.layers[0].register_forward_pre_hook(give, with_kwargs=True)
        logits = layer(inputs_embeds=x[None, :, 0]).logits[0]
    return streams[0][0].flatten(1).numpy(), logits.numpy()


def close(got, want):
    return np.abs(got - want).max() <= 1e-3 * np.abs(want).max()


def scored(count):
    """Rows of all tokens, which need no sampler."""
    return [LogitRow(i, target=1) for i in range(count)]


def head_step(start, count):
    """A step of the head with the hidden states of `count` tokens in rows of the media buffer."""
    rows = scored(count)
    tokens = TOKENS[start + 1 : start + 1 + count]
    tables = [BlockTable(BLOCKS[: -(-(start + count) // 32)])]
    media = list(range(count))
    return pack(StepBatch([SeqChunk(0, tokens, start, tables, rows, media=media)]))


def test_a_head_computes_what_was_published(path, tmp_path):
    head, weights = open_head(path)
    hidden, want = published(path, head, tmp_path / "layer")
    got = guessed(head, weights, hidden)
    assert close(got, want)
    assert not close(got[1:], want[:-1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lacks", ["", "shared_head.head", "embed_tokens"])
def test_a_head_uses_an_embedding_and_an_output_matrix_of_its_own(tmp_path, tied, lacks):
    options = {"tie_word_embeddings": tied}
    path = with_head(tmp_path / "glm4-moe", "glm4-moe", change=own_matrices, **options)
    begin = head_of(path).stored("guess.fc.weight").removesuffix("eh_proj.weight")
    names = {part: f"{begin}{part}.weight" for part in ("embed_tokens", "shared_head.head")}
    if lacks:
        path = cut(path, tmp_path / "cut" / "glm4-moe", names[lacks])
    head, weights = open_head(path)
    hidden, want = published(path, head, tmp_path / "layer", **options)
    assert close(guessed(head, weights, hidden), want)
    table, output = "model.embed_tokens.weight", "lm_head.weight"
    of_model = {"embed_tokens": table, "shared_head.head": table if tied else output}
    own = {part: of_model[part] if part == lacks else name for part, name in names.items()}
    assert [head.stored(table), head.stored(output)] == [*own.values()]


def guessed(head, weights, hidden):
    """The logits of a head after hidden states of its model."""
    tensors = {
        need.name: torch.from_numpy(dequantize(weights.get(need.name)).reshape(need.shape))
        for need in head.program.weights
    }
    interpreter = Interpreter(head.program, tensors, num_blocks=8, num_media=128)
    interpreter.media[: len(hidden)] = torch.from_numpy(hidden)
    return interpreter.run(head_step(0, len(TOKENS) - 1)).numpy()


@pytest.mark.parametrize("sizes", [(69,), (40, 1, 28)], ids=["whole", "parts"])
def test_the_native_executor_computes_a_head_of_its_own_hidden_states(path, tmp_path, sizes):
    checkpoint, (head, weights) = open_checkpoint(path), open_head(path)
    hidden, want = published(path, head, tmp_path / "layer")
    team, found = _C.Team(2), []

    def main():
        model = made(team, build_program(spec_from_config(checkpoint.config)), checkpoint.weights)
        native = made(team, head.program, weights)
        first = 8 if build_program(spec_from_config(checkpoint.config)).states else 0
        sequence, start = Sequence(0, TOKENS, BLOCKS, first), 0
        for size in sizes:
            model.step_logits(step(sequence.chunk(size, scored(size))).words)
            rows = model.read_hidden(np.arange(size, dtype=np.int32))
            native.write_media(0, rows)
            logits = native.step_logits(head_step(start, size).words)
            found.append((rows, logits))
            start += size

    team.run(main)
    assert close(np.concatenate([rows for rows, _ in found]), hidden[:69])
    assert close(np.concatenate([logits for _, logits in found]), want)


def made(team, program, weights, **shared):
    """A native executor in fp32; shared: the KV layers of another one."""
    lowered = Lowering(
        program,
        lambda name: weights.kind(name, "float32"),
        isa=_C.isa_levels()[-1],
        max_tokens=128,
        max_seqs=2,
        max_position=256,
        kv_type="f32",
        activation_bits=16,
        groups=[[i] for i in range(len(program.cache))] if shared else (),
    ).run()
    states = {"num_states": 8} if program.states else {}
    executor = _C.Executor(team, lowered.native, 8, "f32", 2, num_media=128, **states, **shared)
    pack_matrices(executor, lowered, weights, None)
    fill_vectors(executor, lowered, weights)
    return executor


def test_mimo_7b_is_a_qwen2_with_a_head(tmp_path):
    path = with_head(tmp_path / "m", "qwen2")
    config = json.loads((path / "config.json").read_text())
    own = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (path / "config.json").write_text(json.dumps({**config, **own}))
    assert spec_from_config({**config, **own}) == spec_from_config(config)
    head, _ = open_head(path)
    assert head.program.ops == head_of(tiny_model("qwen2")).program.ops
    stored = load_file(path / "model.safetensors")
    assert stored["model.mtp_layers.0.input_proj.weight"].shape == (64, 128)


def test_the_rows_of_a_step_are_found_by_slot():
    first = Sequence(3, TOKENS, BLOCKS)
    first.chunk(33)
    second = Sequence(1, TOKENS, BLOCKS)
    words = step(first.chunk(4), second.chunk(2)).words
    assert rows_by_slot(words) == {3: (33, 0, 4), 1: (0, 4, 2)}


def test_rows_that_the_last_step_does_not_have_are_refused(path):
    checkpoint = open_checkpoint(path)
    team, errors = _C.Team(1), []

    def main():
        program = build_program(spec_from_config(checkpoint.config))
        model = made(team, program, checkpoint.weights)
        sequence = Sequence(0, TOKENS, BLOCKS, 8 if program.states else 0)
        for count in (0, 5):
            if count:
                model.step_logits(step(sequence.chunk(count, scored(count))).words)
            for row in (-1, count):
                with pytest.raises(ValueError, match=rf"has {count} tokens, and no row {row}"):
                    model.read_hidden(np.array([row], np.int32))
                errors.append(row)

    team.run(main)
    assert errors == [-1, 0, -1, 5]


def test_a_head_without_all_its_tensors_says_which_are_missing(path, tmp_path):
    head = head_of(path)
    lacking = head.stored("guess.hidden_norm.weight")
    broken = cut(path, tmp_path / "broken", lacking)
    with pytest.raises(ModelError, match=rf"cannot be used; missing \(1\): {lacking}$"):
        open_head(broken)
    first = head.stored(f"guess.{'h_proj' if path.name == 'deepseek-v4' else 'fc'}.weight")
    assert open_head(cut(path, tmp_path / "none", first)) is None


def cut(path, directory, name):
    """A copy of the checkpoint without a tensor."""
    shutil.copytree(path, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("arch", ["qwen35moe", "deepseek2-glm"])
def test_the_last_block_of_a_gguf_file_is_a_head(tmp_path, arch):
    convert(arch, tmp_path / "m.gguf")  # the block repeats the tensors of the block before it
    checkpoint, (head, weights) = (
        open_checkpoint(tmp_path / "m.gguf"),
        open_head(tmp_path / "m.gguf"),
    )
    last = f"model.layers.{checkpoint.config['num_hidden_layers'] - 1}."
    found = {need.name: dequantize(weights.get(need.name)) for need in head.program.weights}
    layer = [name for name in found if name.startswith("model.layers.0.")]
    assert len(layer) > 10
    for name in layer:
        same = checkpoint.weights.get(name.replace("model.layers.0.", last))
        assert np.array_equal(found[name], dequantize(same)), name
    one = 1.0 - (arch == "qwen35moe")  # there, the file has weights with 1 added
    for name in ("guess.embedding_norm", "guess.hidden_norm", "model.norm"):
        assert (found[f"{name}.weight"] == one).all(), name
    assert (found["guess.fc.weight"] == 1).all()
    assert not {name for name in checkpoint.weights.names() if "eh_proj" in name}
